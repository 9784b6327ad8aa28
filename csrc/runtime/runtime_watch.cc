// SPDX-License-Identifier: Apache-2.0
// What a runtime has watched: deaths of its peers, and its own flight recorder.
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "lib/os/process.h"
#include "runtime/calls/numerics.h"
#include "runtime/runtime.h"
#include "watch/flight_text.h"

namespace farandole {

// Process numbers by rank; 0: on another host, or in a PID namespace in which they mean nothing here.
std::vector<pid_t> Runtime::pids_in_sight(std::span<const Card> cards) const {
  std::vector<pid_t> pids(cards.size());
  for (Rank rank : topology_.local) {
    const Card& card = cards[static_cast<size_t>(rank)];
    const Card& own = cards[static_cast<size_t>(topology_.rank)];
    if (card.pid_namespace == own.pid_namespace) {
      pids[static_cast<size_t>(rank)] = static_cast<pid_t>(card.pid);
    }
  }
  return pids;
}

std::vector<DeathWatch::Peer> Runtime::peers(std::span<const Card> cards) const {
  std::vector<DeathWatch::Peer> peers;
  const Card& own = cards[static_cast<size_t>(topology_.rank)];
  const bool by_pidfd = config_.death_watch != "socket";
  if (by_pidfd && config_.death_watch != "pidfd") {
    throw Error(ErrorCode::kInvalidArgument,
                "FARANDOLE_DEATH_WATCH='" + config_.death_watch + "' is neither pidfd nor socket");
  }
  for (int i = 0; i < topology_.local_size(); ++i) {
    Rank rank = topology_.local[static_cast<size_t>(i)];
    if (rank == topology_.rank) continue;
    const Card& card = cards[static_cast<size_t>(rank)];
    DeathWatch::Peer peer;
    peer.rank = rank;
    peer.pid = static_cast<pid_t>(card.pid);
    peer.start_time = card.start_time;
    peer.same_namespace = by_pidfd && card.pid_namespace == own.pid_namespace;
    if (links_.leads()) peer.socket = links_.member(i).fd();
    if (!links_.leads() && i == 0) peer.socket = links_.leader().fd();
    peers.push_back(peer);
  }
  return peers;
}

// On the watch thread. The leader knows who may end now; what it makes of it, the log tells everyone.
void Runtime::on_death(const DeathWatch::Peer& peer) {
  auto at = std::ranges::lower_bound(topology_.local, peer.rank);
  recorder_->peer_died(peer.rank, static_cast<int>(at - topology_.local.begin()));
  Failure failure{
      ErrorCode::kPeer,
      "rank " + std::to_string(peer.rank) + " (pid " + std::to_string(peer.pid) + " on " +
          host_names_[static_cast<size_t>(peer.rank)] +
          ") died; see its own output for the reason (killed, out of memory, crashed?)"};
  if (leader_) {
    leader_->lose(peer.rank, std::move(failure));
  } else if (peer.rank == topology_.leader()) {
    engine_->fail(std::move(failure));
  }
  bell_->notify();
}

// Only its waiters can tell that the leader stands still: it can't.
void Runtime::look_at_leader() {
  const Standstill::Verdict verdict = leader_stands_->look();
  if (verdict == Standstill::Verdict::kMoves) return;
  const std::string text = leader_stands_->text();
  if (verdict == Standstill::Verdict::kWarn) return log(LogLevel::kWarning, "no progress: " + text);
  engine_->report(Leave{true, "no progress: " + text});  // for the time when it goes on
  engine_->fail(
      {ErrorCode::kStall, "no progress: " + text + " (FARANDOLE_STALL_ABORT sets this limit)"});
  bell_->notify();
}

void Runtime::open_recorder(int64_t began_ns, Deadline deadline) {
  FlightMemory memory(flight_.data(), flight_.size());
  if (links_.leads()) memory.prepare(topology_.local_size(), topology_.size);
  FlightPage::Identity identity{};
  identity.rank = topology_.rank;
  identity.size = topology_.size;
  identity.pid = ::getpid();
  identity.start_time = process_start_time(::getpid()).value_or(0);
  identity.began_ns = began_ns;
  const ClockOffset offset = links_.measure_clock(deadline);
  identity.clock_ns = offset.ns;
  identity.clock_error_ns = offset.error_ns;
  recorder_ = std::make_unique<Recorder>(memory, topology_.local_rank, identity);
}

// Where the launcher's setting asks for one. "DYNAMIC": start_timeline() will.
void Runtime::begin_timeline() {
  if (config_.timeline.empty() || config_.timeline == "DYNAMIC") return;
  start_timeline(config_.timeline, config_.timeline_mark_cycles != 0);
}

void Runtime::start_timeline(const std::string& path, bool mark_cycles) {
  recorder_->timeline().start(timeline_path(path, topology_.rank), mark_cycles);
}

PhaseWatch Runtime::phases_of(SetId set) {
  return {&recorder_->timeline().listening(), [this, set](Phase phase, int64_t begin, int64_t end) {
            constexpr EventKind kKinds[] = {EventKind::kStage, EventKind::kReduce,
                                            EventKind::kConsume};
            recorder_->worked(kKinds[static_cast<size_t>(phase)], set, begin, end);
          }};
}

// What the recorder shows of a call. Names are kept once, however often they are used.
void Runtime::describe(Asked& asked) {
  const Signature& signature = asked.request.signature;
  RecordedCall& recorded = asked.submission.recorded;
  recorded.name = recorder_->label_of(asked.request.name);
  recorded.set = asked.request.set;
  recorded.op = signature.op;
  recorded.dtype = signature.dtype;
  if (!signature.traits().moves_bytes()) return;
  recorded.bytes = size_of(signature.dtype);
  for (int64_t n : asked.submission.shape) recorded.bytes *= static_cast<uint64_t>(n);
}

// Peers fail with the same text, before anything spreads.
void Runtime::check_numerics(const Request& request, const Submission& submission) {
  const Failure unsound = numerics_of(request, submission, topology_.rank);
  if (!unsound) return;
  {
    std::lock_guard lock(engine_->mutex());
    check_open();
    refuse_locked(request, unsound);
  }
  after_submit();
  throw Error(unsound.code, unsound.text);
}

void Runtime::dump(std::span<const int> locals, const std::string& reason) {
  if (config_.flight_dir.empty()) return;
  try {
    dump_flights(recorder_->memory(), locals, config_.flight_dir, reason);
  } catch (const Error& error) {
    log(LogLevel::kWarning, std::string("no flight recorder dump: ") + error.what());
  }
}

void Runtime::dump_host(const std::string& reason) {
  std::vector<int> locals(static_cast<size_t>(topology_.local_size()));
  std::iota(locals.begin(), locals.end(), 0);
  dump(locals, reason);
}

// The first of the living speaks for the dead.
void Runtime::dump_own(const std::string& reason) {
  std::vector<int> locals{topology_.local_rank};
  std::vector<int> dead;
  bool first = true;
  for (int local = 0; local < topology_.local_size(); ++local) {
    const bool died = recorder_->memory().page(local).state == LifeState::kDied;
    if (died) dead.push_back(local);
    if (!died && local < topology_.local_rank) first = false;
  }
  if (first) locals.insert(locals.end(), dead.begin(), dead.end());
  dump(locals, reason);
}

}  // namespace farandole
