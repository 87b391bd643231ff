// convert_weights FROM TO: reads a weights file and writes it again in the format of TO's name.
#include <attn/weights.h>

#include <c10/util/Exception.h>

#include <iostream>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: convert_weights FROM TO\n";
    return 2;
  }
  try {
    attn::save_weights(attn::load_weights(argv[1]), argv[2]);
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  }
}
