// SPDX-License-Identifier: Apache-2.0
#include "control/protocol/message.h"

#include <type_traits>
#include <utility>

namespace farandole {
namespace {

constexpr int32_t kErrorCodeCount = 9;
// The smallest number of bytes of an encoded T.
template <class T>
constexpr size_t kLeast = 0;
template <>
constexpr size_t kLeast<Item> = 24;
template <>
constexpr size_t kLeast<PartInputs> = 8;
template <>
constexpr size_t kLeast<Signature> = 40;
template <>
constexpr size_t kLeast<Contribution> = 18;

// visit() lists the fields of each type once, for both encoding and decoding, so that their order is the same.
struct Writing {
  Encoder out;
  template <class T>
  void operator()(const T& value) {
    out.put(value);
  }
  void operator()(bool value) { out.put(static_cast<uint8_t>(value)); }
  void operator()(const Dimensions& value) { out.put_numbers<int64_t>(value); }
  void operator()(const ByteString& value) { out.put_bytes(value); }
  void operator()(const ByteView& value) { out.put_bytes(value); }
  void operator()(const IdRuns& value) {
    resize(value.runs());
    for (const IdRuns::Run& run : value.runs()) out.put(run);
  }
  template <class T>
  void resize(const std::vector<T>& items) {
    out.put(static_cast<uint32_t>(items.size()));
  }
  template <class E>
  void enumeration(const E& value, int32_t) {
    out.put(static_cast<int32_t>(value));
  }
};

[[noreturn]] void malformed() {
  throw Error(ErrorCode::kInternal, "a control message is malformed");
}

struct Reading {
  Decoder in;
  template <class T>
  void operator()(T& value) {
    value = in.get<T>();
  }
  void operator()(bool& value) { value = in.get_bool(); }
  void operator()(std::string& value) { value = in.get_string(); }
  void operator()(std::vector<int64_t>& value) { value = in.get_vector<int64_t>(); }
  void operator()(Dimensions& value) { value = in.get_vector<int64_t>(); }
  void operator()(std::vector<int32_t>& value) { value = in.get_vector<int32_t>(); }
  void operator()(ByteView& value) { value = in.get_bytes(); }
  void operator()(IdRuns& value) {
    for (uint32_t runs = in.get_count(sizeof(IdRuns::Run)); runs > 0; --runs) {
      const auto run = in.get<IdRuns::Run>();
      const size_t before = value.runs().size();
      const bool sound = run.first > 0 && run.count > 0 &&
                         run.count <= IdRuns::kMost - value.size() &&
                         run.first + run.count > run.count;
      if (sound) value.add(run);
      // The run is invalid, or a correct sender would have merged it into the previous run.
      if (value.runs().size() == before) malformed();
    }
  }
  void operator()(ByteString& value) {
    ByteView bytes = in.get_bytes();
    value.assign(bytes.begin(), bytes.end());
  }
  template <class T>
  void resize(std::vector<T>& items) {
    items.resize(in.get_count(kLeast<T>));
  }
  template <class E>
  void enumeration(E& value, int32_t count) {
    value = in.get_enum<E>(count);
  }
};

template <class V>
void visit(V& v, auto& x);

template <class V>
void visit_all(V& v, auto& items) {
  v.resize(items);
  for (auto& item : items) visit(v, item);
}

template <class V>
void visit(V& v, auto& x) {
  using T = std::remove_cvref_t<decltype(x)>;
  if constexpr (std::is_same_v<T, Signature>) {
    v.enumeration(x.op, kOpCount);
    v.enumeration(x.reduce_op, kReduceOpCount);
    v.enumeration(x.dtype, kDTypeCount);
    v(x.device), v(x.root), v(x.prescale), v(x.postscale), v(x.shape);
  } else if constexpr (std::is_same_v<T, Request>) {
    v(x.set), v(x.name), visit(v, x.signature), visit_all(v, x.more), v(x.no_tensors), v(x.alone);
    v(x.peer), v(x.tag), v(x.site);
  } else if constexpr (std::is_same_v<T, CallKey>) {
    v(x.set), v(x.name), v(x.sequence), v(x.poster);
  } else if constexpr (std::is_same_v<T, Failure>) {
    v.enumeration(x.code, kErrorCodeCount), v(x.text);
  } else if constexpr (std::is_same_v<T, Contribution>) {
    v(x.has_input), v(x.has_payload), v(x.rows), v(x.splits), v(x.payload);
  } else if constexpr (std::is_same_v<T, Ready>) {
    v(x.id);
    if (x.id == 0) visit(v, x.request);
    v(x.sequence), visit(v, x.contribution), visit_all(v, x.more);
  } else if constexpr (std::is_same_v<T, Post>) {
    visit(v, x.request), v(x.number), visit(v, x.contribution), visit(v, x.refusal);
  } else if constexpr (std::is_same_v<T, Matched>) {
    v(x.pair), v(x.sequence), v(x.sender), v(x.sent), v(x.receiver), v(x.received);
  } else if constexpr (std::is_same_v<T, Refuse>) {
    visit(v, x.key), visit(v, x.failure), v.enumeration(x.op, kOpCount), v(x.members);
  } else if constexpr (std::is_same_v<T, Fail>) {
    visit(v, x.key), visit(v, x.failure), v(x.unheard);
  } else if constexpr (std::is_same_v<T, Join>) {
    v(x.set), visit(v, x.failure);
  } else if constexpr (std::is_same_v<T, Done>) {
    v(x.set), v(x.bucket), v(x.gpu);
  } else if constexpr (std::is_same_v<T, Forgot> || std::is_same_v<T, Forget>) {
    v(x.id);
  } else if constexpr (std::is_same_v<T, Leave>) {
    v(x.failed), v(x.text), v(x.waited);
  } else if constexpr (std::is_same_v<T, StackReport>) {
    v(x.stopped), v(x.text), v(x.blocked), visit(v, x.call), v(x.direct_ago_ns);
  } else if constexpr (std::is_same_v<T, Inquire>) {
    v(x.number), visit(v, x.key), v(x.join);
  } else if constexpr (std::is_same_v<T, Stuck>) {
    v(x.set), v(x.bucket), v(x.gpu), v(x.age_ns), v(x.ranks);
  } else if constexpr (std::is_same_v<T, CollectStacks>) {
    v(x.ranks);
  } else if constexpr (std::is_same_v<T, Answer>) {
    v(x.to), v(x.number), v(x.text);
  } else if constexpr (std::is_same_v<T, Notice>) {
    v(x.set), v(x.text);
  } else if constexpr (std::is_same_v<T, Define>) {
    v(x.id), visit(v, x.request);
  } else if constexpr (std::is_same_v<T, PartInputs>) {
    v(x.absent), v(x.rows);
  } else if constexpr (std::is_same_v<T, Item>) {
    v(x.id), v(x.sequence), visit(v, x.inputs), visit_all(v, x.more);
  } else if constexpr (std::is_same_v<T, Run>) {
    v(x.set), v(x.bucket), v(x.gpu), visit_all(v, x.items), v(x.plain);
  } else if constexpr (std::is_same_v<T, Result>) {
    v(x.set), v(x.id), v(x.sequence), v(x.absent), v(x.rows), v(x.payload);
  } else if constexpr (std::is_same_v<T, Joined>) {
    v(x.set), v(x.last), v(x.next_sequence), visit(v, x.failure);
  } else if constexpr (std::is_same_v<T, OpenSet>) {
    v(x.set), v(x.ranks), visit(v, x.key);
  } else if constexpr (std::is_same_v<T, CloseSet>) {
    v(x.set), visit(v, x.key);
  } else if constexpr (std::is_same_v<T, UseGpu>) {
    v(x.uuid), v(x.host), v(x.library), v(x.name);
  } else if constexpr (std::is_same_v<T, OpenGpu>) {
    v(x.set), v(x.key), v.enumeration(x.backend, kBackendKindCount), v(x.ranks);
  } else if constexpr (std::is_same_v<T, Abort> || std::is_same_v<T, Lost>) {
    visit(v, x.failure);
  } else if constexpr (std::is_same_v<T, ReadyMany>) {
    v(x.ids);
  } else {
    static_assert(std::is_same_v<T, Stop> || std::is_same_v<T, Expedite>);
  }
}

template <class Variant>
void encode_variant(const Variant& message, ByteString& out) {
  Writing v{Encoder(out)};
  v(static_cast<uint8_t>(message.index()));
  std::visit([&](const auto& x) { visit(v, x); }, message);
}

template <class Variant, size_t I = 0>
Variant make_alternative(size_t index) {
  if constexpr (I < std::variant_size_v<Variant>) {
    if (index == I) return Variant(std::in_place_index<I>);
    return make_alternative<Variant, I + 1>(index);
  } else {
    throw Error(ErrorCode::kInternal, "a control message has an unknown kind");
  }
}

template <class Variant>
Variant decode_variant(ByteView in) {
  Reading v{Decoder(in)};
  auto message = make_alternative<Variant>(v.in.get<uint8_t>());
  std::visit([&](auto& x) { visit(v, x); }, message);
  v.in.finish();
  return message;
}

}  // namespace

std::string bytes_of(const Request& request) {
  ByteString bytes;
  encode(Entry(Define{0, request}), bytes);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

void encode(const Report& report, ByteString& out) { encode_variant(report, out); }
void encode(const Entry& entry, ByteString& out) { encode_variant(entry, out); }
Report decode_report(ByteView in) { return decode_variant<Report>(in); }
Entry decode_entry(ByteView in) { return decode_variant<Entry>(in); }

}  // namespace farandole
