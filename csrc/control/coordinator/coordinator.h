// SPDX-License-Identifier: Apache-2.0
// Decides what is reduced, and in which order. A pure state machine: reports and the time go in, log
// entries come out; no thread, socket, clock or environment inside. Lives in rank 0. The idea of
// negotiating readiness by name is Horovod's (Sergeev and Del Balso, 2018).
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "control/coordinator/rank_group.h"
#include "control/coordinator/registry.h"
#include "control/coordinator/stall_report.h"
#include "control/prediction/cycle.h"

namespace farandole {

class Coordinator {
 public:
  struct Settings {
    int size = 1;                            // ranks of the world
    size_t fusion_bytes = 32 << 20;          // of one bucket
    size_t gpu_fusion_bytes = 64 << 20;      // of one on GPUs
    std::string gpu_plane = "auto";          // or nccl, host
    std::string shared_gpu = "error";        // two ranks on one GPU; or host, nccl
    std::string gpu_order = "background";    // or program
    size_t capacity = 8192;                  // ids alive at once
    bool average_active = false;             // Average divides by the members that have not joined
    int max_sets = 64;                       // process sets alive at once, the world included
    int64_t stall_warn_ns = 10'000'000'000;  // 0: never
    int64_t stall_abort_ns = 300'000'000'000;  // 0: never
    int bundles = 8;                // that a repeated step is predicted as; 0: no prediction
    size_t bundle_bytes = 1 << 20;  // at least, unless the step ends or somebody waits there
    int repeats = 2;                // of a step before it is predicted
    // Inputs that could ride along are predicted too. Only where lanes add them in the same order: between
    // hosts they do not, and a sum's bits must not depend on its being predicted.
    bool bundle_tiny = true;
  };
  explicit Coordinator(Settings settings);
  ~Coordinator();

  // A report of one rank. A report that its rank could not have sent throws Error(kInternal).
  void receive(Rank from, const Report& report, int64_t now_ns);
  // Ranks that may report together: those on one host, or below it. Returns their number.
  int add_group(std::vector<Rank> ranks);
  // A report of all of them that are in its set: ReadyAll, or Ready with input and an id.
  void receive_all(int group, const Report& report, int64_t now_ns);
  // A rank has died or cannot go on: as if it had left with this failure.
  void lose(Rank rank, Failure failure);
  // The time goes on: looks for stalls when next_tick() has come.
  void tick(int64_t now_ns);
  int64_t next_tick() const { return next_tick_ns_; }  // INT64_MAX: nothing waits

  // What the ranks must learn now, in log order, in the place of what `log` held. Call after a batch of
  // reports: everything that became ready in the batch may share a bucket.
  void publish(std::vector<Entry>& log);
  // A process set that publish() has just opened can't be had after all (no memory).
  void withdraw_set(SetId id) { sets_.erase(id); }
  // What a person should read (stalls), since the last call.
  std::vector<std::string> take_notices();
  // Who was the last of a set to be ready for something, and how long after the first; since the last call.
  struct LateRank {
    Rank rank;
    int64_t after_ns;
  };
  void take_late_ranks(std::vector<LateRank>& into) {
    into.clear();
    into.swap(late_ranks_);
  }

  // For tests and metrics.
  size_t definitions() const { return registry_.size(); }
  size_t bundles() const { return bundles_.size(); }

 private:
  struct Group {
    int settled = 0;           // calls that are complete
    std::vector<Call*> calls;  // those that wait for the others
    Failure failure;           // of one, hence of all
  };
  struct Set {
    SetId id = 0;
    std::vector<Rank> ranks;  // ascending
    MemberMask joined;
    MemberMask left;
    Rank last_joined = -1;
    bool has_gpu = false;       // OpenGpu is in the log
    bool has_nccl = false;      // and said NCCL
    std::deque<Call*> on_gpus;  // complete, agreed, for the lane of GPUs
    uint64_t gpu_buckets = 0;   // as the two below, of that lane
    uint64_t gpu_buckets_done = 0;
    uint64_t buckets = 0;                       // published
    uint64_t buckets_done = 0;                  // as the lowest rank says
    int64_t moving_since_ns = 0;                // the bucket that moves now
    std::deque<std::unique_ptr<Call>> unnamed;  // from first_unnamed on
    uint64_t first_unnamed = 0;
    std::map<std::string, Group> groups;
    // Complete, agreed, not published:
    std::vector<Call*> at_once;                          // the log entry is all that they need
    std::deque<std::variant<Call*, OpenBundle*>> ready;  // for the lane
    Cycle cycle{0};
    int members() const { return static_cast<int>(ranks.size()); }
    bool is_moving() const { return buckets > buckets_done; }
  };

  // Reports
  void on(Rank from, const Ready& ready, int64_t now_ns);
  void on(Rank from, const Refuse& refuse, int64_t now_ns);
  void on(Rank from, const Join& join, int64_t now_ns);
  void on(Rank from, const Done& done, int64_t now_ns);
  void on(Rank from, const Forgot& forgot, int64_t now_ns);
  void on(Rank from, const Leave& leave, int64_t now_ns);
  void on(Rank from, const Whereabouts& whereabouts, int64_t now_ns);
  void on(Rank from, const Inquire& inquire, int64_t now_ns);
  void on(Rank from, const Lost& lost, int64_t now_ns);
  void on(Rank from, const ReadyAll& ready, int64_t now_ns);
  void on(Rank from, const Split& split, int64_t now_ns);

  // Of groups; false: it has to be taken rank by rank.
  bool on_all(RankGroup& group, const Ready& ready, int64_t now_ns);
  bool on_all(RankGroup& group, const ReadyAll& ready, int64_t now_ns);
  void heard(const RankGroup& group, int64_t now_ns);
  void on(Rank from, const UseGpu& gpu, int64_t now_ns);
  void on(Rank from, const GpuKey& key, int64_t now_ns);
  static void on(Rank, const Hurry&, int64_t) {}  // for leaders on the way

  static int member_of(const Set& set, Rank rank);  // -1: not in it
  Set* set_of(SetId id, Rank from);
  Call& find_call(Set& set, Definition& definition, const Request& request, uint64_t sequence,
                  int64_t now_ns);
  Call& unnamed_slot(Set& set, uint64_t sequence);
  void fail_late(const CallKey& key, const Failure& failure);
  void came_last(const Set& set, Rank rank, int64_t after_ns);
  void settle(Set& set, Call& call);  // when complete: ready, grouped or failed
  void settle_grouped(Set& set, Call& call, const std::vector<Call::GroupTerms>& groups,
                      const Failure& failure);
  Failure verdict(const Set& set, Call& call) const;
  void queue(Set& set, Call& call);
  void fail(Call& call, const Failure& failure);
  void retire(Call& call);                  // its id is free again
  std::vector<Call*> open_calls(Set& set);  // in no particular order

  // Calls that wait for a rank
  std::vector<Call*> waiting_calls(Set& set);
  void give_up(Set& set, Call& call, const Failure& failure);
  void give_up_stalled(Set& set, int64_t now_ns);
  void give_up_standing(const Set& set, int64_t now_ns);
  int64_t patience_ns() const;
  void expect_progress(int64_t since_ns, int64_t now_ns);
  WaitingCall view_of(const Set& set, const Call& call) const;
  WaitingCall view_of_bucket(const Set& set) const;
  std::vector<WaitingCall> waiting_for(int64_t age_ns, int64_t now_ns);  // oldest first
  std::vector<WaitingCall> all_waiting(int64_t now_ns);
  RankState state_of(Rank rank) const;
  const Whereabouts* answer_of(Rank rank) const;  // null: it is silent
  StateOf states() const;
  void ask(const std::vector<WaitingCall>& calls, int64_t now_ns);
  void conclude(int64_t now_ns);

  // Bundles
  OpenBundle& bundle_of(uint32_t id);
  void begin_round(OpenBundle& bundle, int64_t now_ns);
  void complete_round(Set& set, OpenBundle& bundle);
  void spill(OpenBundle& bundle, int64_t now_ns);
  void unbundle(OpenBundle& bundle, int64_t now_ns);
  void unbundle_all(const Set& set, int64_t now_ns);
  void unbundle_late(int64_t now_ns);
  int64_t next_unbundling() const;
  void may_bundle(Set& set, const Call& call);
  void bundle_up(Set& set);
  bool may_be_bundled(const Set& set, uint32_t id);
  void open_bundles(Set& set, std::vector<uint32_t> ids, size_t target);
  void open_bundle(Set& set, std::vector<uint32_t> ids, size_t bytes);

  // Process sets
  void add_set(const CallKey& key, std::span<const int64_t> ranks);
  void remove_set(const CallKey& key, SetId id);
  void open_set(SetId id, std::vector<Rank> ranks);
  void end_join(Set& set);
  Failure blame_leavers(const Set& set, const CallKey& key, const Request& request) const;

  // GPUs
  bool open_gpu(Set& set);
  void run_gpu_bucket(Set& set);
  bool may_use_nccl(const Set& set);
  bool may_split(const Set& set) const;
  std::optional<std::pair<Rank, Rank>> sharing(const Set& set) const;

  // Publishing
  void flush(Set& set);
  void define(Call& call);
  void finish_at_once(Set& set, Call& call);
  ByteString payload_of(const Set& set, const Call& call) const;
  void run_bucket(Set& set);

  Settings settings_;
  std::map<Rank, UseGpu> gpus_;
  Registry registry_;
  std::map<SetId, std::unique_ptr<Set>> sets_;
  SetId next_set_ = 1;
  std::vector<RankGroup> groups_;
  std::map<uint32_t, std::unique_ptr<OpenBundle>> bundles_;
  uint32_t next_bundle_ = 1;
  uint64_t completed_ = 0;  // calls
  std::vector<Entry> log_;
  std::set<std::tuple<SetId, std::string, uint64_t>> late_;  // calls that log_ fails for late ranks
  std::vector<std::string> notices_;
  std::vector<LateRank> late_ranks_;
  MemberMask left_;
  bool broken_ = false;
  bool stopped_ = false;
  int64_t next_tick_ns_;

  // Where ranks are that others wait for: the last question and its answers.
  int64_t now_ns_ = 0;             // of the last report or tick
  std::vector<int64_t> heard_ns_;  // by rank: its last call; -1: none yet
  std::set<Rank> asked_;
  std::map<Rank, Whereabouts> answers_;
  int64_t asked_ns_ = -1;
  std::map<Rank, Whereabouts> earlier_answers_;  // to the question before
  int64_t earlier_ns_ = -1;                      // when that was asked
  int64_t next_question_ns_ = 0;
  bool question_open_ = false;
  std::vector<std::pair<int64_t, WaitingCall>> lost_;  // given up of late, and when
};

}  // namespace farandole
