// SPDX-License-Identifier: Apache-2.0
// Combines the reports of a host's ranks, and of the hosts below it, for the host above: equal ones become
// one record "all of us report this", and those of several calls one record of their ids. A pure state machine:
// reports, log entries and the time go in, records come out. To the coordinator some reports just come a little
// late: those of one call leave together, and calls leave in batches during a step, to save messages. The first
// after a pause, and those that a user waits for, leave at once.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "control/protocol/message.h"

namespace farandole {

// Visits the records of a message. Empty `ranks`: all members below (of the set concerned). Throws
// Error(kInternal) on a rank that is not in `below` (ascending).
using RecordVisitor = std::function<void(const std::vector<Rank>& ranks, ByteView report)>;
void for_each_record(ByteView message, const std::vector<Rank>& below, const RecordVisitor& visit);

class Aggregator {
 public:
  // How long an incomplete report waits for the other ranks. No call goes on before they have reported, so it is
  // of use only to tell who is missing; and one by one they cost the root much more.
  static constexpr int64_t kPatienceNs = 50'000'000;

  // Time between two batches. It doubles from the shortest to the longest, and starts anew after a pause of
  // twice the longest.
  static constexpr int64_t kShortestGatherNs = 250'000;
  static constexpr int64_t kLongestGatherNs = 10'000'000;

  // `size`: of the world; `below`: ranks of this host and the hosts below, ascending; `gathers_above`: the
  // host above batches, too.
  Aggregator(int size, std::vector<Rank> below, bool gathers_above = false);

  // `ranks`: who reports. Several, or (none) all members in `child`, the ranks below a child (see HostTree).
  void receive(const std::vector<Rank>& ranks, const std::vector<Rank>& child, ByteView report,
               int64_t now_ns);
  void receive(Rank from, ByteView report, int64_t now_ns) { receive({from}, {}, report, now_ns); }
  // Reads log entries on their way down.
  void read(const Entry& entry);
  void tick(int64_t now_ns);
  int64_t next_tick() const;  // INT64_MAX: nothing waits
  // The message for the host above; empty: none yet.
  ByteString take(int64_t now_ns);

 private:
  // Of a named call its id and 0; of an unnamed one, which ranks may report by different ids, 0 and its sequence.
  struct Key {
    SetId set;
    uint32_t id;
    uint64_t sequence;
    auto operator<=>(const Key&) const = default;
  };
  struct Pending {
    int heard = 0;            // ranks that have reported it
    std::vector<Rank> plain;  // those with plain contributions, the same from all
    ByteString report;        // theirs; empty: the id says it all
    std::vector<std::pair<std::vector<Rank>, ByteString>> others;
    int64_t since_ns = 0;
  };
  struct SetBelow {
    std::vector<Rank> ranks;  // its members below, ascending
    bool straight = false;    // a member has joined, or the set is closed: forward at once
  };
  // `gone` ids are kept: hosts below that have not yet read the log may still report them for all.
  struct KnownCall {
    SetId set;
    bool named;
    bool gone = false;
  };
  using KnownById = std::map<uint32_t, KnownCall>;

  // Who reports, as receive() takes it.
  struct Source {
    const std::vector<Rank>& ranks;
    const std::vector<Rank>& child;
    // Of the set last asked for.
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
  std::map<std::vector<Rank>, IdRuns> ready_;  // more of them, one for each row

  const bool gathers_above_;
  bool asked_ = false;         // rank 0, for a sign of life; no entry has come since
  bool urgent_ = false;        // out_ holds other reports than readiness
  std::set<Rank> expediting_;  // ranks whose users wait
  bool expedite_sent_ = true;  // the host above has been told, if it batches
  int64_t gather_ns_ = kShortestGatherNs;
  int64_t sent_ns_ = -2 * kLongestGatherNs;  // never
};

}  // namespace farandole
