// SPDX-License-Identifier: Apache-2.0
// Combines the reports of a host's ranks, and of the hosts below, into records for the host above. Equal reports become
// a single record, and several calls become a single record of ids. The Aggregator is a pure state machine: it takes
// reports, log entries and the time, and returns records. To save messages, it sends the reports of a call together,
// and sends calls in batches. However, it forwards at once the first report after a pause, and reports for which a user
// waits.
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

// Calls `visit` for each record of a message. If `ranks` is empty, the record is for all ranks below that are members
// of the call's set. Throws Error(kInternal) if a rank is not in `below`, which must be ascending.
using RecordVisitor = std::function<void(const std::vector<Rank>& ranks, ByteView report)>;
void for_each_record(ByteView message, const std::vector<Rank>& below, const RecordVisitor& visit);

// Only the driver may call these functions. Call receive() and read() in any order, then take().
class Aggregator {
 public:
  // Longest time for which the reports of a call wait here for the reports of other ranks. Sending them separately
  // costs the root more, and only serves to name the missing ranks. Later reports of such a call go up at once (see
  // early_).
  static constexpr int64_t kPatienceNs = 50'000'000;

  // Limits of the time between two batches. It doubles with each batch; a pause of twice the longest time resets it.
  static constexpr int64_t kShortestGatherNs = 250'000;
  static constexpr int64_t kLongestGatherNs = 10'000'000;

  // `size` is the number of ranks in the world. `below` holds the ranks of this host and of the hosts below, in
  // ascending order. `gathers_above` is true if the host above has an Aggregator.
  Aggregator(int size, std::vector<Rank> below, bool gathers_above = false);

  // `ranks` are the ranks that report. If `ranks` is empty, every rank in `child` that is a member of the call's set
  // reports. `child` lists the ranks of the branch (HostTree) from which the report came.
  void receive(const std::vector<Rank>& ranks, const std::vector<Rank>& child, ByteView report,
               int64_t now_ns);
  void receive(Rank from, ByteView report, int64_t now_ns) { receive({from}, {}, report, now_ns); }
  // Reads log entries on their way down to the ranks.
  void read(const Entry& entry);
  void tick(int64_t now_ns);
  int64_t next_tick() const;  // INT64_MAX if nothing waits
  // Returns the message for the host above, or "" if there is nothing to send yet.
  ByteString take(int64_t now_ns);

 private:
  // Key of a call. A named call has its id and the sequence 0. An unnamed call has the id 0 and its sequence, because
  // ranks may report it with different ids.
  struct Key {
    SetId set;
    uint32_t id;
    uint64_t sequence;
    auto operator<=>(const Key&) const = default;
  };
  struct Held {
    int heard = 0;            // number of ranks that have reported the call
    std::vector<Rank> plain;  // ranks with plain contributions, all of which are equal
    ByteString report;        // the report of the ranks in `plain`; empty if the id suffices
    std::vector<std::pair<std::vector<Rank>, ByteString>> others;
    int64_t since_ns = 0;
  };
  struct SetBelow {
    std::vector<Rank> ranks;  // the members below, ascending
    bool straight = false;    // forward reports at once: a member has joined, or the set is closed
  };
  // Forgotten ids stay known, because hosts below that have not read the Forget may report such an id for all their
  // ranks.
  struct KnownCall {
    SetId set = kWorldSet;
    std::string name;  // empty for an unnamed call
    bool named() const { return !name.empty(); }
  };
  using KnownById = std::map<uint32_t, KnownCall>;

  // The sender of a report. See receive() for `ranks` and `child`.
  struct Sender {
    const std::vector<Rank>& ranks;
    const std::vector<Rank>& child;
    // A cache that holds the last set and the members of this set in `child`.
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
  std::map<std::pair<SetId, std::string>, uint32_t> names_;  // ids by name, except forgotten ids
  bool leaving_ = false;  // a rank leaves, so everything is forwarded at once
  std::map<Key, Held> held_;
  // Calls whose reports go up at once, either because a report of the call has gone up without the others or because
  // the call has failed. This lasts until all ranks have made such a call (Run or Result). A Fail never ends it,
  // because a report that crosses the Fail may be about the failed call or about the next call. A forgotten id stays
  // here until it is defined again.
  std::set<Key> early_;
  ByteString out_;                             // records for the next message
  std::map<std::vector<Rank>, IdRuns> ready_;  // ids by ranks; each element will become a record

  const bool gathers_above_;
  bool asked_ = false;   // has asked rank 0 for a sign of life, and has not read an entry since
  bool urgent_ = false;  // out_ has records that are not about ready calls
  std::set<Rank> expediting_;  // ranks whose users wait
  bool expedite_sent_ = true;  // the host above knows these ranks
  int64_t gather_ns_ = kShortestGatherNs;
  int64_t sent_ns_ = -2 * kLongestGatherNs;  // initially, no message has been sent yet
};

}  // namespace farandole
