#include "json.h"

#include "weights/in_quotes.h"

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>

#include <unordered_set>
#include <vector>

namespace attn {

nlohmann::json parse_json(std::string_view text, const std::string& name) {
  using Value = nlohmann::json;
  constexpr int kDeepest = 64;
  std::vector<std::unordered_set<std::string>> open_objects;  // the keys seen in each
  const auto watch = [&](int depth, Value::parse_event_t event, Value& value) {
    switch (event) {
      case Value::parse_event_t::object_start:
        open_objects.emplace_back();
        [[fallthrough]];
      case Value::parse_event_t::array_start:
        TORCH_CHECK_VALUE(depth < kDeepest, name, ": JSON must be nested at most ", kDeepest,
                          " deep, got more");
        break;
      case Value::parse_event_t::object_end:
        open_objects.pop_back();
        break;
      case Value::parse_event_t::key: {
        const auto& key = value.get_ref<const std::string&>();
        TORCH_CHECK_VALUE(open_objects.back().insert(key).second, name,
                          ": a JSON object must have each key once, got two of ",
                          weights::in_quotes(key));
        break;
      }
      default:
        break;
    }
    return true;  // keep the value
  };
  try {
    return Value::parse(text.begin(), text.end(), watch);
  } catch (const Value::exception& error) {
    C10_THROW_ERROR(ValueError,
                    c10::str(name, ": must hold JSON, got ", weights::in_quotes(error.what())));
  }
}

}  // namespace attn
