// SPDX-License-Identifier: Apache-2.0
// What a host's leader makes of the reports of its ranks, and of the hosts below it: equal ones become one
// record, "all of us report this". A pure state machine: reports, log entries and the time go in, records
// come out. To the coordinator it is as if some reports had come a little late: those of one call leave together,
// and calls in batches while a step is under way, so that it costs few messages; the first after a pause, and what
// somebody waits for, at once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "control/protocol/message.h"

namespace farandole {

// Visits the records of one message. `ranks` is empty: all members below (of the set that it is about).
// Throws Error(kInternal) on a rank that is not in `below`, ascending.
using RecordVisitor = std::function<void(const std::vector<Rank>& ranks, ByteView report)>;
void for_each_record(ByteView message, const std::vector<Rank>& below, const RecordVisitor& visit);

class Aggregator {
 public:
  // How long an incomplete report waits for others.
  static constexpr int64_t kPatienceNs = 20'000'000;

  // Between two batches. It doubles from the shortest to the longest, and begins anew after a pause of twice
  // the longest.
  static constexpr int64_t kShortestGatherNs = 250'000;
  static constexpr int64_t kLongestGatherNs = 10'000'000;

  // size: of the world; below: ranks of this host and of those below it, ascending. gathers_above: the host
  // above does the same.
  Aggregator(int size, std::vector<Rank> below, bool gathers_above = false);

  // ranks: who reports it; several, or none for all of `child` (see HostTree), if a host below says so.
  void receive(const std::vector<Rank>& ranks, const std::vector<Rank>& child, ByteView report,
               int64_t now_ns);
  void receive(Rank from, ByteView report, int64_t now_ns) { receive({from}, {}, report, now_ns); }
  // The log, as it passes on its way down.
  void read(const Entry& entry);
  void tick(int64_t now_ns);
  int64_t next_tick() const;  // INT64_MAX: nothing waits
  // The message for the host above; empty: nothing to say yet.
  ByteString take(int64_t now_ns);

 private:
  enum class Kind : uint8_t { kCall, kBundle };
  using Key = std::tuple<Kind, uint32_t, uint64_t>;  // id, sequence
  struct Pending {
    int heard = 0;            // ranks that have reported it
    std::vector<Rank> plain;  // of these: those whose reports are alike
    ByteString report;
    std::vector<std::pair<std::vector<Rank>, ByteString>> others;
    int64_t since_ns = 0;
  };
  struct SetBelow {
    std::vector<Rank> ranks;  // its members below, ascending
    bool straight = false;    // somebody has joined, or it is closed: nothing waits
  };
  // Hosts below may still report for all what the log has just taken back: they have not read that yet.
  struct Known {
    SetId set;
    bool gone = false;
  };
  using KnownById = std::map<uint32_t, Known>;

  static void take_back(KnownById& table, uint32_t id);
  void hold(const Key& key, const SetBelow& set, const std::vector<Rank>& ranks, bool plain,
            ByteView report, int64_t now_ns);
  void release(const Pending& pending, const SetBelow* whole);
  void release_all();
  void record(const std::vector<Rank>& ranks, ByteView report);
  void tell_haste();
  bool in_haste() const { return urgent_ || !hurrying_.empty(); }

  std::vector<Rank> below_;
  std::map<SetId, SetBelow> sets_;
  KnownById ids_;
  KnownById bundles_;
  bool leaving_ = false;  // somebody leaves: nothing waits any more
  std::map<Key, Pending> pending_;
  ByteString out_;

  const bool gathers_above_;
  bool urgent_ = false;      // there is more in out_ than who is ready
  std::set<Rank> hurrying_;  // their users wait
  bool haste_told_ = true;   // to the host above, if it gathers
  int64_t gather_ns_ = kShortestGatherNs;
  int64_t sent_ns_ = -2 * kLongestGatherNs;  // never
};

}  // namespace farandole
