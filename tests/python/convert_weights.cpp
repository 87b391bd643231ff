// convert_weights FROM TO: reads a weights file and writes it again in the format of TO's name.
// convert_weights --gpt2 FROM TO: the same with folders of GPT-2, by way of the model.
#include <attn/models/gpt2.h>
#include <attn/weights.h>

#include <c10/util/Exception.h>

#include <iostream>
#include <string_view>

int main(int argc, char** argv) {
  const bool gpt2 = argc == 4 && std::string_view(argv[1]) == "--gpt2";
  if (argc != 3 && !gpt2) {
    std::cerr << "usage: convert_weights [--gpt2] FROM TO\n";
    return 2;
  }
  try {
    if (gpt2) {
      attn::save_gpt2(*attn::load_gpt2(argv[2]), argv[3]);
    } else {
      attn::save_weights(attn::load_weights(argv[1]), argv[2]);
    }
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
}
