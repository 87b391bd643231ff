#include "weights/pickle.h"

#include "weights/in_quotes.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>

namespace attn::weights {
namespace {

constexpr size_t kMostDimensions = 64;  // PyTorch's own limit
constexpr size_t kLongestKey = 20;      // digits of a storage's number

constexpr size_t kLongestPickle = size_t{64} << 20;  // values take up to 100 times their bytes

// What a state_dict or checkpoint may name. None of it is ever called.
constexpr std::string_view kRebuildTensor = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view kRebuildParameter = "torch._utils._rebuild_parameter";
constexpr std::string_view kRebuildParameterWithState =
    "torch._utils._rebuild_parameter_with_state";
constexpr std::string_view kOrderedDict = "collections.OrderedDict";
constexpr std::string_view kSize = "torch.Size";
constexpr std::string_view kDevice = "torch.device";
constexpr std::string_view kSet = "builtins.set";
constexpr std::string_view kStorageSuffix = "Storage";
constexpr std::array<std::string_view, 31> kKnown = {
    kRebuildTensor,
    kRebuildParameter,
    kRebuildParameterWithState,
    kOrderedDict,
    kSize,
    kDevice,
    kSet,
    "torch.FloatStorage",
    "torch.DoubleStorage",
    "torch.HalfStorage",
    "torch.BFloat16Storage",
    "torch.LongStorage",
    "torch.IntStorage",
    "torch.ShortStorage",
    "torch.CharStorage",
    "torch.ByteStorage",
    "torch.BoolStorage",
    "torch.ComplexFloatStorage",
    "torch.ComplexDoubleStorage",
    "torch.float32",
    "torch.float64",
    "torch.float16",
    "torch.bfloat16",
    "torch.int64",
    "torch.int32",
    "torch.int16",
    "torch.int8",
    "torch.uint8",
    "torch.bool",
    "torch.complex64",
    "torch.complex128",
};

/// The stack machine of Python's `pickle`, less everything that runs code.
class Machine {
 public:
  Machine(std::string_view bytes, const std::string& file) : bytes_(bytes), file_(file) {}

  Pickle run();

 private:
  [[noreturn]] void refuse(const std::string& requirement, const std::string& got) const {
    TORCH_CHECK_VALUE(false, file_, ": the pickle must ", requirement, ", got ", got, " at byte ",
                      at_);
  }

  // --- bytes
  std::string_view take(uint64_t size) {
    if (size > bytes_.size() - at_) refuse("hold what it announces", "an early end");
    const auto part = bytes_.substr(at_, size);
    at_ += size;
    return part;
  }
  template <typename T>
  T number() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string_view line() {
    const auto end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) refuse("end its lines", "an early end");
    const auto text = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return text;
  }

  // --- stack
  void push(PickledValue value) { stack_.push_back(std::move(value)); }
  void push_text(std::string_view text) { push({std::make_shared<const std::string>(text)}); }
  size_t base() const { return marks_.empty() ? 0 : marks_.back(); }
  PickledValue& top() {
    if (stack_.size() <= base()) refuse("keep values for its operations", "an empty stack");
    return stack_.back();
  }
  PickledValue pop() {
    auto value = std::move(top());
    stack_.pop_back();
    return value;
  }
  std::vector<PickledValue> pop_to_mark() {
    if (marks_.empty()) refuse("mark where a list begins", "no mark");
    const auto begin = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<PickledValue> values(std::make_move_iterator(begin),
                                     std::make_move_iterator(stack_.end()));
    stack_.erase(begin, stack_.end());
    marks_.pop_back();
    return values;
  }

  // --- values
  PickledDict* push_dict() {
    result_.dicts.push_back(std::make_unique<PickledDict>());
    push({result_.dicts.back().get()});
    return result_.dicts.back().get();
  }
  void push_list(std::vector<PickledValue> items) {
    result_.lists.push_back(std::make_unique<PickledList>());
    result_.lists.back()->items = std::move(items);
    push({result_.lists.back().get()});
  }
  void append(std::vector<PickledValue> items) {
    auto* const* list = std::get_if<PickledList*>(&top().value);
    if (list == nullptr) refuse("append to a list", top().describe());
    (*list)->items.insert((*list)->items.end(), std::make_move_iterator(items.begin()),
                          std::make_move_iterator(items.end()));
  }
  void set_items(std::vector<PickledValue> values) {
    if (values.size() % 2 != 0) refuse("pair keys and values", "a key alone");
    auto* const* dict = std::get_if<PickledDict*>(&top().value);
    if (dict == nullptr) refuse("put items into a dict", top().describe());
    for (size_t i = 0; i < values.size(); i += 2)
      (*dict)->items.emplace_back(std::move(values[i]), std::move(values[i + 1]));
  }

  void set_memo(uint64_t index) {
    // Python's writer numbers them one after another; a jump would be an allocation.
    if (index > memo_.size()) refuse("number its memo one after another", std::to_string(index));
    if (index == memo_.size()) {
      memo_.push_back(top());
    } else {
      memo_[index] = top();
    }
  }
  void get_memo(uint64_t index) {
    if (index >= memo_.size()) refuse("read what it memorised", std::to_string(index));
    push(memo_[index]);
  }

  void push_global(std::string module, const std::string& name) {
    if (module == "__builtin__") module = "builtins";
    const auto full = module + "." + name;
    const auto* known = std::find(kKnown.begin(), kKnown.end(), full);
    TORCH_CHECK_VALUE(known != kKnown.end(), file_,
                      ": the pickle must hold tensors and plain values only, got ", in_quotes(full),
                      ", which is not run or read here; save the model's state_dict() instead");
    push({PickledGlobal{*known}});
  }
  void push_long(std::string_view bytes) {
    // Little-endian two's complement.
    if (bytes.size() > 8) return push({PickledOpaque{"a long integer"}});
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size(); ++i)
      value |= static_cast<uint64_t>(static_cast<unsigned char>(bytes[i])) << (8 * i);
    if (!bytes.empty() && bytes.size() < 8 && (bytes.back() & 0x80) != 0)
      value |= ~uint64_t{0} << (8 * bytes.size());
    push({static_cast<int64_t>(value)});
  }

  // --- what stands for a call
  void reduce();
  void push_storage(const PickledValue& id);
  PickledValue tensor(const PickledList& arguments) const;
  int64_t integer(const PickledValue& value, const char* what) const {
    const auto* found = std::get_if<int64_t>(&value.value);
    if (found == nullptr) refuse(std::string("have integers for ") + what, value.describe());
    return *found;
  }
  std::vector<int64_t> integers(const PickledValue& value, const char* what) const {
    const auto* list = value.list();
    if (list == nullptr) refuse(std::string("have a tuple for ") + what, value.describe());
    if (list->items.size() > kMostDimensions)
      refuse("have tensors of at most 64 dimensions", std::to_string(list->items.size()));
    std::vector<int64_t> numbers;
    for (const auto& item : list->items) numbers.push_back(integer(item, what));
    return numbers;
  }

  std::string_view bytes_;
  const std::string& file_;
  size_t at_ = 0;
  std::vector<PickledValue> stack_, memo_;
  std::vector<size_t> marks_;
  Pickle result_;
};

// (storage, offset, size, stride, requires_grad, backward_hooks[, metadata])
PickledValue Machine::tensor(const PickledList& arguments) const {
  if (arguments.items.size() < 4) refuse("rebuild tensors from 6 values", "fewer");
  const auto* storage =
      std::get_if<std::shared_ptr<const PickledStorage>>(&arguments.items[0].value);
  if (storage == nullptr) refuse("rebuild tensors from storages", arguments.items[0].describe());
  const auto* metadata = arguments.items.size() > 6 ? arguments.items[6].dict() : nullptr;
  if (metadata != nullptr && !metadata->items.empty())
    refuse("have tensors without conjugate or negative bits", "one with metadata");
  return {std::make_shared<const PickledTensor>(
      PickledTensor{*storage, integer(arguments.items[1], "a tensor's offset"),
                    integers(arguments.items[2], "a tensor's shape"),
                    integers(arguments.items[3], "a tensor's strides")})};
}

void Machine::reduce() {
  const auto arguments = pop(), callee = pop();
  const auto* global = std::get_if<PickledGlobal>(&callee.value);
  if (global == nullptr) refuse("call classes and functions", callee.describe());
  const auto* list = arguments.list();
  if (list == nullptr) refuse("call with a tuple of arguments", arguments.describe());
  const auto& name = global->name;
  if (name == kRebuildTensor) return push(tensor(*list));
  if (name == kRebuildParameter || name == kRebuildParameterWithState) {
    if (list->items.empty()) refuse("rebuild parameters from tensors", "nothing");
    return push(list->items[0]);
  }
  if (name == kOrderedDict) {  // the items follow
    if (!list->items.empty()) refuse("make OrderedDicts empty and fill them", "one with items");
    push_dict();
    return;
  }
  if (name == kSize || name == kSet) {
    if (list->items.size() != 1 || list->items[0].list() == nullptr)
      refuse("make a torch.Size or set of one list", "something else");
    return push(list->items[0]);
  }
  if (name == kDevice) return push({PickledOpaque{"a device"}});
  refuse("call what makes tensors and containers only", in_quotes(name));
}

// ('storage', type, key, location, numel); what the file itself says of the location is of no use:
// the caller says where to.
void Machine::push_storage(const PickledValue& id) {
  const auto* list = id.list();
  if (list == nullptr || list->items.size() < 3)
    refuse("refer to storages by tuples", id.describe());
  const auto* kind = list->items[0].text();
  const auto* type = std::get_if<PickledGlobal>(&list->items[1].value);
  const auto* key = list->items[2].text();
  if (kind == nullptr || *kind != "storage" || type == nullptr || key == nullptr)
    refuse("refer to storages as ('storage', type, key, ...)", "something else");
  if (!type->name.ends_with(kStorageSuffix))
    refuse("refer to storages by their classes", in_quotes(type->name));
  if (key->empty() || key->size() > kLongestKey ||
      key->find_first_not_of("0123456789") != std::string::npos)
    refuse("number its storages", in_quotes(*key));
  const auto short_name = type->name.substr(type->name.rfind('.') + 1);
  push({std::make_shared<const PickledStorage>(PickledStorage{*key, short_name})});
}

Pickle Machine::run() {
  for (;;) {
    const char op = take(1)[0];
    switch (op) {
      case '\x80':  // PROTO
        if (const auto version = number<uint8_t>(); version > 5)
          refuse("be of protocol 5 or less", std::to_string(version));
        break;
      case '\x95':  // FRAME
        number<uint64_t>();
        break;
      case '.': {  // STOP
        result_.root = pop();
        if (!stack_.empty() || !marks_.empty()) refuse("leave one value", "more");
        return std::move(result_);
      }
      case '(':  // MARK
        marks_.push_back(stack_.size());
        break;
      case '0':  // POP
        if (stack_.size() == base() && !marks_.empty()) {
          marks_.pop_back();
        } else {
          pop();
        }
        break;
      case '1':  // POP_MARK
        pop_to_mark();
        break;
      case '2':  // DUP
        stack_.push_back(top());
        break;

      case 'N':
        push({PickledOpaque{"None"}});
        break;
      case '\x88':
        push({true});
        break;
      case '\x89':
        push({false});
        break;
      case 'J':  // BININT
        push({static_cast<int64_t>(number<int32_t>())});
        break;
      case 'K':  // BININT1
        push({static_cast<int64_t>(number<uint8_t>())});
        break;
      case 'M':  // BININT2
        push({static_cast<int64_t>(number<uint16_t>())});
        break;
      case '\x8a':  // LONG1
        push_long(take(number<uint8_t>()));
        break;
      case '\x8b': {  // LONG4
        const auto size = number<int32_t>();
        if (size < 0) refuse("have sizes of at least 0", std::to_string(size));
        push_long(take(static_cast<uint64_t>(size)));
        break;
      }
      case 'G': {  // BINFLOAT, big-endian
        uint64_t bits = __builtin_bswap64(number<uint64_t>());
        double value;
        std::memcpy(&value, &bits, sizeof value);
        push({value});
        break;
      }
      case 'X':  // BINUNICODE
        push_text(take(number<uint32_t>()));
        break;
      case '\x8c':  // SHORT_BINUNICODE
        push_text(take(number<uint8_t>()));
        break;
      case '\x8d':  // BINUNICODE8
        push_text(take(number<uint64_t>()));
        break;
      case 'U':  // SHORT_BINSTRING
        push_text(take(number<uint8_t>()));
        break;
      case 'T': {  // BINSTRING
        const auto size = number<int32_t>();
        if (size < 0) refuse("have sizes of at least 0", std::to_string(size));
        push_text(take(static_cast<uint64_t>(size)));
        break;
      }
      case 'C':  // SHORT_BINBYTES
        take(number<uint8_t>());
        push({PickledOpaque{"bytes"}});
        break;
      case 'B':  // BINBYTES
        take(number<uint32_t>());
        push({PickledOpaque{"bytes"}});
        break;

      case ')':  // EMPTY_TUPLE
        push_list({});
        break;
      case ']':     // EMPTY_LIST
      case '\x8f':  // EMPTY_SET
        push_list({});
        break;
      case '}':  // EMPTY_DICT
        push_dict();
        break;
      case 't':     // TUPLE
      case 'l':     // LIST
      case '\x91':  // FROZENSET
        push_list(pop_to_mark());
        break;
      case '\x85':    // TUPLE1
      case '\x86':    // TUPLE2
      case '\x87': {  // TUPLE3
        std::vector<PickledValue> items(static_cast<size_t>(op - '\x84'));
        for (size_t i = items.size(); i-- > 0;) items[i] = pop();
        push_list(std::move(items));
        break;
      }
      case 'a': {  // APPEND
        std::vector<PickledValue> one;
        one.push_back(pop());
        append(std::move(one));
        break;
      }
      case 'e':     // APPENDS
      case '\x90':  // ADDITEMS
        append(pop_to_mark());
        break;
      case 'd': {  // DICT
        auto items = pop_to_mark();
        push_dict();
        set_items(std::move(items));
        break;
      }
      case 's': {  // SETITEM
        std::vector<PickledValue> pair(2);
        pair[1] = pop();
        pair[0] = pop();
        set_items(std::move(pair));
        break;
      }
      case 'u':  // SETITEMS
        set_items(pop_to_mark());
        break;

      case 'q':  // BINPUT
        set_memo(number<uint8_t>());
        break;
      case 'r':  // LONG_BINPUT
        set_memo(number<uint32_t>());
        break;
      case '\x94':  // MEMOIZE
        set_memo(memo_.size());
        break;
      case 'h':  // BINGET
        get_memo(number<uint8_t>());
        break;
      case 'j':  // LONG_BINGET
        get_memo(number<uint32_t>());
        break;

      case 'c': {  // GLOBAL
        const std::string module(line()), name(line());
        push_global(module, name);
        break;
      }
      case '\x93': {  // STACK_GLOBAL
        const auto name = pop(), module = pop();
        if (name.text() == nullptr || module.text() == nullptr)
          refuse("name its classes by strings", name.describe());
        push_global(*module.text(), *name.text());
        break;
      }
      case 'R':  // REDUCE
        reduce();
        break;
      case 'Q':  // BINPERSID
        push_storage(pop());
        break;
      case 'b':  // BUILD: an object's attributes, as a state_dict's _metadata; of no use here
        pop();
        top();
        break;
      default: {
        const auto code = static_cast<unsigned char>(op);
        refuse("use opcodes of tensors and plain values",
               "opcode " + std::to_string(code) +
                   (code >= 0x20 && code < 0x7f ? " ('" + std::string(1, op) + "')" : ""));
      }
    }
  }
}

}  // namespace

std::string PickledValue::describe() const {
  struct {
    std::string operator()(const PickledOpaque& x) const { return std::string(x.what); }
    std::string operator()(bool x) const { return x ? "True" : "False"; }
    std::string operator()(int64_t x) const { return std::to_string(x); }
    std::string operator()(double x) const { return std::to_string(x); }
    std::string operator()(const std::shared_ptr<const std::string>& x) const {
      return in_quotes(*x);
    }
    std::string operator()(const PickledGlobal& x) const { return std::string(x.name); }
    std::string operator()(const std::shared_ptr<const PickledStorage>&) const {
      return "a storage";
    }
    std::string operator()(const std::shared_ptr<const PickledTensor>&) const { return "a tensor"; }
    std::string operator()(const PickledDict*) const { return "a dict"; }
    std::string operator()(const PickledList*) const { return "a list"; }
  } name;
  return std::visit(name, value);
}

Pickle read_pickle(std::string_view bytes, const std::string& file) {
  TORCH_CHECK_VALUE(bytes.size() <= kLongestPickle, file, ": the pickle must be at most ",
                    kLongestPickle, " bytes, got ", bytes.size());
  return Machine(bytes, file).run();
}

}  // namespace attn::weights
