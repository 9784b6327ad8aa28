// SPDX-License-Identifier: Apache-2.0
// Combines the reports of a host's ranks and of the hosts below into records for the host above: equal reports become
// one record, and several calls one record of ids. A pure state machine: reports, log entries and the time go in,
// records come out. To save messages, it sends the reports of a call together, and calls in batches. It forwards at
// once the first report after a pause, and reports for which a user waits.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "control/protocol/message.h"

namespace farandole {

// Calls `visit` for each record of a message. Empty `ranks`: all ranks below that are members of the call's set. Throws
// Error(kInternal) if a rank is not in `below` (ascending).
using RecordVisitor = std::function<void(const std::vector<Rank>& ranks, ByteView report)>;
void for_each_record(ByteView message, const std::vector<Rank>& below, const RecordVisitor& visit);

// Driver only. Order: receive() and read() in any order, then take().
class Aggregator {
 public:
  // Longest time for which reports of a call wait here for other ranks' reports. Separate reports cost the root more,
  // and their only use is to name missing ranks. Later reports of such a call go up at once: see early_.
  static constexpr int64_t kPatienceNs = 50'000'000;

  // Limits of the time between two batches. That time doubles with each batch; a pause of twice the longest resets it.
  static constexpr int64_t kShortestGatherNs = 250'000;
  static constexpr int64_t kLongestGatherNs = 10'000'000;

  // `size`: of the world. `below`: ranks of this host and of hosts below, ascending. `gathers_above`: the host above
  // has an Aggregator.
  Aggregator(int size, std::vector<Rank> below, bool gathers_above = false);

  // `ranks`: the reporting ranks. Empty: all members of the call's set in `child`, the branch of a child (HostTree).
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
  // Key of a call. Named: id, and sequence 0. Unnamed: id 0, and sequence: ranks may report it by different ids.
  struct Key {
    SetId set;
    uint32_t id;
    uint64_t sequence;
    auto operator<=>(const Key&) const = default;
  };
  struct Held {
    int heard = 0;            // ranks that have reported it
    std::vector<Rank> plain;  // ranks with plain contributions, which are equal
    ByteString report;        // the report of `plain`; empty: the id suffices
    std::vector<std::pair<std::vector<Rank>, ByteString>> others;
    int64_t since_ns = 0;
  };
  struct SetBelow {
    std::vector<Rank> ranks;  // members below, ascending
    bool straight = false;    // forward reports at once: a member has joined, or the set is closed
  };
  // Forgotten ids stay known, because hosts below that have not read the Forget may still report for all their ranks.
  struct KnownCall {
    SetId set = kWorldSet;
    std::string name;  // empty: unnamed
    bool named() const { return !name.empty(); }
  };
  using KnownById = std::map<uint32_t, KnownCall>;

  // Sender of a report, as in receive().
  struct Sender {
    const std::vector<Rank>& ranks;
    const std::vector<Rank>& child;
    // Cache: the last set, and its members in `child`.
    const SetBelow* set = nullptr;
    std::vector<Rank> members = {};
  };

  void receive_many(const ReadyMany& many, Sender& sender, int64_t now_ns);
  void receive_one(const Report& report, ByteView bytes, Sender& sender, int64_t now_ns);
  const KnownCall* known(uint32_t id) const;
  const std::vector<Rank>& members_of(Sender& sender, const KnownCall* known);
  std::optional<Key> key_of(const Report& report, const KnownCall* call) const;
  std::optional<Key> find_key(const CallKey& key) const;
  bool passes(const KnownCall* call, const Key& key);
  void read_end(const Entry& entry);
  void read_define(const Define& define);
  void read_forget(uint32_t id);
  void end(SetId set, uint32_t id, uint64_t sequence);
  void stop_expediting(const std::vector<Rank>& ranks);
  Held& hear(const Key& key, const std::vector<Rank>& ranks, int64_t now_ns);
  void release_if_whole(const Key& key, const Held& held);
  void release(const Key& key, const Held& held, const SetBelow* whole);
  void release_early(Key key);
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
  std::map<std::pair<SetId, std::string>, uint32_t> names_;  // ids by name, without forgotten ones
  bool leaving_ = false;  // a rank leaves: forward everything at once
  std::map<Key, Held> held_;
  // Calls whose reports go up at once, until all ranks have made such a call (Run or Result): a report has gone up
  // without the others, or the call has failed. A report that crosses a Fail may mean the call before it or the next
  // one, so a Fail never puts an end to this. Forgotten ids are here until they are defined again.
  std::set<Key> early_;
  ByteString out_;                             // records
  std::map<std::vector<Rank>, IdRuns> ready_;  // ids by ranks: each element will be a record

  const bool gathers_above_;
  bool asked_ = false;         // has asked rank 0 for a sign of life; still no entry
  bool urgent_ = false;        // out_ has records that are not about ready calls
  std::set<Rank> expediting_;  // ranks whose users wait
  bool expedite_sent_ = true;  // the host above knows them
  int64_t gather_ns_ = kShortestGatherNs;
  int64_t sent_ns_ = -2 * kLongestGatherNs;  // never
};

}  // namespace farandole
