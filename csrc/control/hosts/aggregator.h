// SPDX-License-Identifier: Apache-2.0
// Combines the reports of a host's ranks, and of the hosts below, for the host above: equal reports become one record,
// and those of several calls one record of ids. A pure state machine: reports, log entries and the time go in, records
// come out. To save messages, reports of one call leave together, and calls leave in batches during a step. The first
// report after a pause, and those for which a user waits, leave at once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "control/protocol/message.h"

namespace farandole {

// Visits the records of a message. Empty `ranks`: all members below of the set concerned. Throws Error(kInternal) on
// a rank that is not in `below` (ascending).
using RecordVisitor = std::function<void(const std::vector<Rank>& ranks, ByteView report)>;
void for_each_record(ByteView message, const std::vector<Rank>& below, const RecordVisitor& visit);

// Driver only. Order: receive() and read() in any order, then take().
class Aggregator {
 public:
  // Longest wait of an incomplete report. It only helps to name missing ranks, and single reports cost the root more.
  static constexpr int64_t kPatienceNs = 50'000'000;

  // Time between two batches. It doubles from the shortest to the longest; a pause of twice the longest resets it.
  static constexpr int64_t kShortestGatherNs = 250'000;
  static constexpr int64_t kLongestGatherNs = 10'000'000;

  // `size`: of the world. `below`: ranks of this host and below, ascending. `gathers_above`: the host above batches.
  Aggregator(int size, std::vector<Rank> below, bool gathers_above = false);

  // `ranks`: the reporting ranks. Empty: all members in `child`, the ranks below a child (see HostTree).
  void receive(const std::vector<Rank>& ranks, const std::vector<Rank>& child, ByteView report,
               int64_t now_ns);
  void receive(Rank from, ByteView report, int64_t now_ns) { receive({from}, {}, report, now_ns); }
  // Reads log entries on their way down.
  void read(const Entry& entry);
  void tick(int64_t now_ns);
  int64_t next_tick() const;  // INT64_MAX: nothing waits
  // Returns the message for the host above; empty: none yet.
  ByteString take(int64_t now_ns);

 private:
  // Key of a call: id and 0 if named; 0 and sequence if unnamed, because ranks may report those by different ids.
  struct Key {
    SetId set;
    uint32_t id;
    uint64_t sequence;
    auto operator<=>(const Key&) const = default;
  };
  struct Pending {
    int heard = 0;            // ranks that have reported it
    std::vector<Rank> plain;  // ranks with plain contributions, which are equal
    ByteString report;        // the report of `plain`; empty: the id suffices
    std::vector<std::pair<std::vector<Rank>, ByteString>> others;
    int64_t since_ns = 0;
  };
  struct SetBelow {
    std::vector<Rank> ranks;  // members below, ascending
    bool straight = false;    // forward at once: a member has joined, or the set is closed
  };
  // Keeps `gone` ids: hosts below that have not read the log yet may still report them for all.
  struct KnownCall {
    SetId set;
    bool named;
    bool gone = false;
  };
  using KnownById = std::map<uint32_t, KnownCall>;

  // Source of a report, as in receive().
  struct Source {
    const std::vector<Rank>& ranks;
    const std::vector<Rank>& child;
    // Last set that was looked up, and its members.
    const SetBelow* set = nullptr;
    std::vector<Rank> members = {};
  };

  void receive_many(const ReadyMany& many, Source& source, int64_t now_ns);
  void receive_one(const Report& report, ByteView bytes, Source& source, int64_t now_ns);
  const KnownCall* known(uint32_t id) const;
  const std::vector<Rank>& members_of(Source& source, const KnownCall* known);
  bool holds(const KnownCall* known) const;
  void stop_expediting(const std::vector<Rank>& ranks);
  Pending& hear(const Key& key, const std::vector<Rank>& ranks, int64_t now_ns);
  void release_if_whole(const Key& key, const Pending& pending);
  void release(const Key& key, const Pending& pending, const SetBelow* whole);
  void release_all();
  void record(const std::vector<Rank>& ranks, ByteView report);
  void record_ready(const std::vector<Rank>& ranks, uint32_t id);
  void write_ready();
  void write(const std::vector<Rank>& ranks, ByteView report);
  void tell_expedite();
  bool nothing_waits() const { return out_.empty() && ready_.empty(); }
  bool expedites() const { return urgent_ || !expediting_.empty(); }

  std::vector<Rank> below_;
  std::map<SetId, SetBelow> sets_;
  KnownById ids_;
  bool leaving_ = false;  // a rank leaves: forward everything at once
  std::map<Key, Pending> pending_;
  ByteString out_;                             // records
  std::map<std::vector<Rank>, IdRuns> ready_;  // further records, one per row

  const bool gathers_above_;
  bool asked_ = false;         // rank 0 was asked for a sign of life, and no entry has come since
  bool urgent_ = false;        // out_ holds more than readiness
  std::set<Rank> expediting_;  // ranks whose users wait
  bool expedite_sent_ = true;  // the host above knows (if it batches)
  int64_t gather_ns_ = kShortestGatherNs;
  int64_t sent_ns_ = -2 * kLongestGatherNs;  // never
};

}  // namespace farandole
