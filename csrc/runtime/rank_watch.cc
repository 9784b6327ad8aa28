// SPDX-License-Identifier: Apache-2.0
#include "runtime/rank_watch.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/logging.h"
#include "lib/os/process.h"

namespace farandole {
namespace {

// A waiting rank looks for stalls four times within the shorter of the two limits, FARANDOLE_STALL_WARN and
// FARANDOLE_STALL_ABORT.
RankWatch::Patience patience_of(const Config& config, const Topology& topology) {
  RankWatch::Patience patience{nanoseconds(config.stall_warn).count(),
                               nanoseconds(config.stall_abort).count(), 0, topology.rank != 0};
  for (const int64_t limit : {patience.warn_ns, patience.abort_ns}) {
    constexpr int64_t kShortest = 10'000'000;
    const int64_t pause = std::max(limit / 4, kShortest);
    if (limit > 0 && (patience.pause_ns == 0 || pause < patience.pause_ns)) {
      patience.pause_ns = pause;
    }
  }
  return patience;
}

}  // namespace

RankWatch::RankWatch(const Config& config, const Topology& topology, Fabric& fabric,
                     std::span<const PeerInfo> peer_infos, StackSource stacks, int64_t began_ns)
    : config_(config),
      topology_(topology),
      fabric_(fabric),
      pids_(pids_in_sight(peer_infos)),
      patience_(patience_of(config, topology)),
      stack_reporter_(std::make_unique<StackReporter>(stacks)) {
  open_recorder(began_ns);
}

void RankWatch::start(std::span<const PeerInfo> peer_infos, OnDeath on_death) {
  // With FARANDOLE_TIMELINE=DYNAMIC, only start_timeline() starts a timeline.
  if (!config_.timeline.empty() && config_.timeline != "DYNAMIC") {
    start_timeline(config_.timeline, config_.timeline_mark_cycles != 0);
  }
  deaths_ = std::make_unique<DeathWatch>(
      peers_of(peer_infos), [this, on_death = std::move(on_death)](const DeathWatch::Peer& peer) {
        tell_death(peer, on_death);
      });
}

void RankWatch::stop() {
  deaths_.reset();
  stack_reporter_.reset();
}

std::string RankWatch::why_standing() const {
  const std::vector<Rank> above = HostTree::above(topology_.node);
  std::string unseen;
  for (Rank leader = above[static_cast<size_t>(topology_.rank)]; leader >= 0;
       leader = above[static_cast<size_t>(leader)]) {
    const std::string pid = std::to_string(pids_[static_cast<size_t>(leader)]);
    if (pid == "0") {
      const std::string its_host = " on " + fabric_.host_names()[static_cast<size_t>(leader)];
      unseen += (unseen.empty() ? "rank " : ", or rank ") + std::to_string(leader) + its_host;
    } else if (is_stopped(pids_[static_cast<size_t>(leader)])) {
      return "rank " + std::to_string(leader) + " (pid " + pid + "), which leads the " +
             (leader == 0 ? "job" : "ranks of this host") +
             ", is stopped by a signal or a debugger; `kill -CONT " + pid + "` resumes it";
    }
  }
  if (unseen.empty()) return {};
  return unseen +
         ", through which this rank exchanges control messages, does not answer: a signal or a "
         "debugger has stopped its process (`kill -CONT` there resumes it), or it gets no CPU "
         "time";
}

std::string RankWatch::why_silent() const {
  const std::string why = why_standing();
  return why.empty() ? "rank 0, which leads the job, does not answer" : why;
}

// Uses 0 for ranks in other PID namespaces, because their process ids may belong to different processes here.
std::vector<pid_t> RankWatch::pids_in_sight(std::span<const PeerInfo> peer_infos) const {
  std::vector<pid_t> pids(peer_infos.size());
  for (Rank rank : topology_.local) {
    const PeerInfo& peer_info = peer_infos[static_cast<size_t>(rank)];
    const PeerInfo& own = peer_infos[static_cast<size_t>(topology_.rank)];
    if (peer_info.pid_namespace == own.pid_namespace) {
      pids[static_cast<size_t>(rank)] = static_cast<pid_t>(peer_info.pid);
    }
  }
  return pids;
}

std::vector<DeathWatch::Peer> RankWatch::peers_of(std::span<const PeerInfo> peer_infos) const {
  std::vector<DeathWatch::Peer> peers;
  const PeerInfo& own = peer_infos[static_cast<size_t>(topology_.rank)];
  const bool by_pidfd = config_.death_watch == "pidfd";
  for (int i = 0; i < topology_.local_size(); ++i) {
    Rank rank = topology_.local[static_cast<size_t>(i)];
    if (rank == topology_.rank) continue;
    const PeerInfo& peer_info = peer_infos[static_cast<size_t>(rank)];
    DeathWatch::Peer peer;
    peer.rank = rank;
    peer.pid = static_cast<pid_t>(peer_info.pid);
    peer.start_time = peer_info.start_time;
    peer.same_namespace = by_pidfd && peer_info.pid_namespace == own.pid_namespace;
    if (fabric_.leads()) peer.socket = fabric_.sockets().member(i).fd();
    if (!fabric_.leads() && i == 0) peer.socket = fabric_.sockets().leader().fd();
    peers.push_back(peer);
  }
  return peers;
}

// Records the death and calls `on_death`. The coordinator knows if that rank may end now, and informs all ranks.
void RankWatch::tell_death(const DeathWatch::Peer& peer, const OnDeath& on_death) {
  recorder_->peer_died(peer.rank, index_in(topology_.local, peer.rank));
  on_death(peer.rank,
           {ErrorCode::kPeer,
            "rank " + std::to_string(peer.rank) + " (pid " + std::to_string(peer.pid) + " on " +
                fabric_.host_names()[static_cast<size_t>(peer.rank)] +
                ") died; see its own output for the reason (killed, out of memory, crashed?)"});
}

void RankWatch::open_recorder(int64_t began_ns) {
  FlightMemory memory(fabric_.flight().data(), topology_.local_size(), topology_.size);
  FlightPage::Identity identity{};
  identity.rank = topology_.rank;
  identity.size = topology_.size;
  identity.world = topology_.world;
  identity.pid = ::getpid();
  identity.start_time = process_start_time(::getpid()).value_or(0);
  identity.began_ns = began_ns;
  std::string folder = config_.flight_dir;
  if (!folder.empty() && topology_.world > 1) folder += "/world-" + std::to_string(topology_.world);
  recorder_ = std::make_unique<Recorder>(memory, topology_.local_rank, identity, std::move(folder));
}

void RankWatch::start_timeline(const std::string& path, bool mark_cycles) {
  recorder_->timeline().start(timeline_path(path, topology_.rank), mark_cycles);
}

PhaseWatch RankWatch::phases_of(SetId set) {
  return {&recorder_->timeline().listening(), [this, set](Phase phase, int64_t begin, int64_t end) {
            constexpr EventKind kKinds[] = {EventKind::kStage, EventKind::kReduce,
                                            EventKind::kConsume};
            recorder_->worked(kKinds[static_cast<size_t>(phase)], set, begin, end);
          }};
}

}  // namespace farandole
