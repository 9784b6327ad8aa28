// SPDX-License-Identifier: Apache-2.0
// From ready calls to log entries: results that are known at once, and buckets for the lanes.
#include <algorithm>
#include <utility>

#include "control/coordinator/coordinator.h"
#include "control/coordinator/open_bundle.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

constexpr uint64_t kMaxOutstanding = 2;       // buckets of one set: one moves, one waits behind it
constexpr size_t kMaxItems = 1024;            // of one bucket: bounds the log entry
constexpr size_t kMaxResultBytes = 16 << 10;  // that travel in the log

// Average divides by the number of members, joined or not (Horovod's rule), or by the active ones.
int64_t divisor_of(const Call& call, int members, bool active_only) {
  if (!traits_of(call.signature().reduce_op).divides) return 1;
  return active_only ? call.active_members() : members;
}

// Sums payloads in member order: the same order, hence the same bits, as the host plane.
ByteString reduce_payloads(const Call& call, int members, int64_t divisor) {
  const Signature& s = call.signature();
  std::vector<const void*> inputs;
  inputs.reserve(static_cast<size_t>(members));
  for (int m = 0; m < members; ++m) {
    if (call.has_input(m)) inputs.push_back(call.payload(m).data());
  }
  ByteString result(s.bytes());
  kernels::Factors factors{s.prescale, s.postscale, divisor};
  kernels::reduce(s.dtype, s.reduce_op, result.data(), inputs.data(),
                  static_cast<int>(inputs.size()), static_cast<size_t>(s.elements()), factors);
  return result;
}

ByteString in_member_order(const Call& call, int members) {
  ByteString whole;
  whole.reserve(call.payloads().size());
  for (int m = 0; m < members; ++m) {
    const ByteView piece = call.payload(m);
    whole.insert(whole.end(), piece.begin(), piece.end());
  }
  return whole;
}

// The log entry is all that the ranks need: there is nothing to move, or it travels in the log.
bool finishes_at_once(const Call& call) {
  if (!call.signature().traits().moves_bytes() || call.absent()) return true;
  return call.rode_along() && call.bytes() <= kMaxResultBytes;
}

Item item_of(const Call& call, int64_t divisor) {
  const Signature& s = call.signature();
  std::vector<int32_t> absent;
  if (!s.traits().rooted()) absent = call.absent_members();
  return {call.id(), call.key().sequence, divisor, std::move(absent), call.rows()};
}

}  // namespace

void Coordinator::queue(Set& set, Call& call) {
  call.queue();
  registry_.at(call.id())->completed = ++completed_;
  if (finishes_at_once(call)) {
    set.at_once.push_back(&call);
  } else if (call.signature().device != kCpuDevice) {
    set.on_gpus.push_back(&call);
  } else {
    set.ready.push_back(&call);
  }
}

void Coordinator::publish(std::vector<Entry>& log) {
  for (auto& [id, set] : sets_) {
    if (!broken_) flush(*set);
  }
  for (uint32_t id : registry_.evict()) log_.push_back(Forget{id});
  if (!stopped_ && left_.full()) {
    stopped_ = true;
    log_.push_back(Stop{});
  }
  log.clear();
  log.swap(log_);
  late_.clear();
}

void Coordinator::flush(Set& set) {
  for (Call* call : set.at_once) finish_at_once(set, *call);
  set.at_once.clear();
  // When all have left, nothing may come after Stop: the rest goes out now.
  auto may_run = [&] { return left_.full() || set.buckets - set.buckets_done < kMaxOutstanding; };
  while (!set.ready.empty() && may_run()) run_bucket(set);
  auto gpus_may_run = [&] {
    return left_.full() || set.gpu_buckets - set.gpu_buckets_done < kMaxOutstanding;
  };
  while (!set.on_gpus.empty() && gpus_may_run()) {
    if (open_gpu(set)) run_gpu_bucket(set);
  }
  auto finished = [](const Call& c) { return !c.is_open() && c.id() != 0; };
  while (!set.unnamed.empty() && finished(*set.unnamed.front())) {
    set.unnamed.pop_front();
    ++set.first_unnamed;
  }
  end_join(set);
  bundle_up(set);
}

// Ranks learn a request once, and again when it has changed.
void Coordinator::define(Call& call) {
  Definition& definition = *registry_.at(call.id());
  if (call.redefines()) definition.request = call.request();
  if (call.redefines() || !definition.published) {
    log_.push_back(Define{definition.id, definition.request});
    definition.published = true;
  }
}

void Coordinator::finish_at_once(Set& set, Call& call) {
  const Signature& s = call.signature();
  if (s.op == Op::kAddSet) {
    add_set(call.key(), s.shape);
  } else if (s.op == Op::kRemoveSet) {
    remove_set(call.key(), s.root);
  } else {
    Result result{set.id, call.id(), call.key().sequence, call.absent(), call.rows(), {}};
    if (!call.absent()) result.payload = payload_of(set, call);
    define(call);
    log_.push_back(std::move(result));
    may_bundle(set, call);
  }
  retire(call);
}

// The result of inputs that rode along.
ByteString Coordinator::payload_of(const Set& set, const Call& call) const {
  switch (call.signature().traits().pattern) {
    case Pattern::kReduceToAll: {
      const int64_t divisor = divisor_of(call, set.members(), settings_.average_active);
      return reduce_payloads(call, set.members(), divisor);
    }
    case Pattern::kOneToAll: {
      const ByteView root = call.payload(member_of(set, call.signature().root));
      return {root.begin(), root.end()};
    }
    case Pattern::kEachToAll: return in_member_order(call, set.members());
    default: return {};
  }
}

// Takes calls and bundles from the front until the bucket is full. Members of a group stay together.
void Coordinator::run_bucket(Set& set) {
  std::vector<Item> items;
  std::vector<uint32_t> bundles;
  size_t bytes = 0;
  std::string group;
  while (!set.ready.empty()) {
    if (auto* waiting = std::get_if<OpenBundle*>(&set.ready.front())) {
      OpenBundle& bundle = **waiting;
      bool begun = !items.empty() || !bundles.empty();
      if (begun && bytes + bundle.bytes > settings_.fusion_bytes) break;
      group.clear();
      bytes += bundle.bytes;
      set.ready.pop_front();
      bundle.end_round();
      bundles.push_back(bundle.id);
      continue;
    }
    Call& call = *std::get<Call*>(set.ready.front());
    const std::string& its_group = call.request().group;
    bool bound = !its_group.empty() && its_group == group;
    bool full = bytes + call.bytes() > settings_.fusion_bytes || items.size() >= kMaxItems;
    if ((!items.empty() || !bundles.empty()) && full && !bound) break;
    group = its_group;
    bytes += call.bytes();
    set.ready.pop_front();
    define(call);
    items.push_back(item_of(call, divisor_of(call, set.members(), settings_.average_active)));
    may_bundle(set, call);
    retire(call);
  }
  if (!set.is_moving()) {
    set.moving_since_ns = now_ns_;
    expect_progress(now_ns_, now_ns_);
  }
  log_.push_back(Run{set.id, ++set.buckets, std::move(items), std::move(bundles)});
}

// As run_bucket: one lane of its own, so that neither kind of memory waits for the other.
void Coordinator::run_gpu_bucket(Set& set) {
  std::vector<Item> items;
  size_t bytes = 0;
  std::string group;
  while (!set.on_gpus.empty()) {
    Call& call = *set.on_gpus.front();
    const std::string& its_group = call.request().group;
    bool bound = !its_group.empty() && its_group == group;
    bool full = bytes + call.bytes() > settings_.gpu_fusion_bytes || items.size() >= kMaxItems;
    if (!items.empty() && full && !bound) break;
    group = its_group;
    bytes += call.bytes();
    set.on_gpus.pop_front();
    define(call);
    items.push_back(item_of(call, divisor_of(call, set.members(), settings_.average_active)));
    retire(call);
  }
  log_.push_back(Run{set.id, ++set.gpu_buckets, std::move(items), {}, true});
}

}  // namespace farandole
