// SPDX-License-Identifier: Apache-2.0
// What must hold whatever the ranks do, seen from outside the coordinator.
#include <algorithm>

#include "check.h"
#include "control/simulator/simulator.h"

namespace farandole::simulation {
namespace {

constexpr uint64_t kMaxOutstanding = 2;
constexpr uint8_t kWorked = kDone | kAbsent;

}  // namespace

void Statistics::add(const Statistics& other) {
  reports += other.reports;
  entries += other.entries;
  buckets += other.buckets;
  duplicates += other.duplicates;
  forgotten += other.forgotten;
  notices += other.notices;
  batches += other.batches;
  group_reports += other.group_reports;
  nested_reports += other.nested_reports;
  deaths += other.deaths;
  for (size_t i = 0; i < std::size(ends); ++i) ends[i] += other.ends[i];
}

void Simulator::check_entry(const Entry& entry) {
  if (trace_) print("log: " + text_of(entry));
  if (auto* define = std::get_if<Define>(&entry)) check_definition(*define);
  if (auto* run = std::get_if<Run>(&entry)) check_bucket(*run);
  if (std::holds_alternative<Abort>(entry)) aborted_ = true;
  if (auto* forget = std::get_if<Forget>(&entry)) {
    CHECK_EQ(table_.erase(forget->id), size_t{1});
    dropped_[forget->id];
    ++statistics_.forgotten;
  }
}

// An id means one thing at a time: it is given out again only when every rank has dropped it.
void Simulator::check_definition(const Define& define) {
  auto dropped = dropped_.find(define.id);
  if (dropped != dropped_.end()) {
    CHECK_EQ(dropped->second.size(), members_.size());
    dropped_.erase(dropped);
  }
  auto known = table_.find(define.id);
  if (known != table_.end()) {
    CHECK(!define.request.name.empty());
    CHECK_EQ(known->second.name, define.request.name);
    CHECK_EQ(known->second.set, define.request.set);
  }
  table_[define.id] = define.request;
}

void Simulator::check_bucket(const Run& run) {
  ++statistics_.buckets;
  Buckets& buckets = buckets_[run.set];
  CHECK_EQ(run.bucket, buckets.published + 1);
  buckets.published = run.bucket;
  bool all_left = left_ == members_.size();  // what is left goes out at once
  CHECK(all_left || buckets.published - buckets.done <= kMaxOutstanding);
  size_t calls = 0, bytes = 0;
  auto add = [&](const Request& request, size_t its_bytes) {
    CHECK_EQ(request.set, run.set);
    ++calls;
    bytes += its_bytes;
    for (const Signature& other : request.more) bytes += other.bytes();
  };
  for (const Item& item : run.items) {
    const Request& request = table_.at(item.id);
    const Signature& s = request.signature;
    int64_t rows = 0;
    for (int64_t n : item.told.rows) rows += n;
    add(request, item.told.rows.empty()
                     ? s.bytes()
                     : static_cast<size_t>(rows * s.row_elements()) * size_of(s.dtype));
  }
  run.plain.for_each([&](uint32_t id) { add(table_.at(id), table_.at(id).signature.bytes()); });
  CHECK(calls > 0);
  // A call may be too much only if it is alone.
  CHECK(calls == 1 || bytes <= program_.settings.fusion_bytes);
}

void Simulator::settled(int call, const Run& run, const Item& item) {
  uint64_t& bucket = bucket_of_[static_cast<size_t>(call)];
  CHECK(bucket == 0 || bucket == run.bucket);
  if (bucket != 0) return;
  bucket = run.bucket;
  check_run(program_, call, item);
}

void Simulator::settled(int call, const Result& result) {
  if (checked_[static_cast<size_t>(call)]) return;
  checked_[static_cast<size_t>(call)] = true;
  CHECK_EQ(bucket_of_[static_cast<size_t>(call)], 0);
  check_result(program_, call, result);
}

void Simulator::check_end() {
  for (const Member& m : members_) {
    statistics_.duplicates += m.rank->duplicates();
    if (m.rank->dead()) continue;
    m.rank->check_end();
    CHECK_EQ(m.cursor, log_.size());
    const auto& table = m.rank->table();
    for (size_t id = 0; id < table.size(); ++id) {
      CHECK_EQ(table[id] != nullptr, table_.contains(static_cast<uint32_t>(id)));
    }
  }
  check_calls();
  if (aborted_) return;
  // What more it forgets is of no interest to ranks that have left.
  std::vector<Entry> ignored;
  for (int i = 0; i < 30; ++i) coordinator_.publish(ignored);
  CHECK(coordinator_.definitions() <= program_.settings.capacity + stuck_);
}

// All ranks agree whether a call has worked.
void Simulator::check_calls() {
  for (size_t c = 0; c < program_.calls.size(); ++c) {
    uint8_t ends = 0;
    for (const Member& m : members_) {
      uint8_t end = m.rank->dead() ? 0 : m.rank->outcome(static_cast<int>(c));
      ends |= end;
      ++statistics_.ends[end];
    }
    if (ends & (kPeerGone | kStalled)) ++stuck_;
    if (aborted_) continue;  // it may come between two ranks' ends of one bucket
    // The last ranks may change a set without those that have given it up and left.
    const uint8_t failed =
        spares_the_left(program_.calls[c].request) ? ~kWorked & ~kStalled : ~kWorked;
    if ((ends & kWorked) != 0 && (ends & failed) != 0) {
      check::fail("call " + std::to_string(c) + " '" + program_.calls[c].request.name +
                  "' works on some ranks only: outcomes " + std::to_string(ends));
    }
  }
}

}  // namespace farandole::simulation
