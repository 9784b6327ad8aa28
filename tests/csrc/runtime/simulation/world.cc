// SPDX-License-Identifier: Apache-2.0
#include "runtime/simulation/world.h"

#include <algorithm>
#include <cstdio>
#include <limits>

#include "check.h"
#include "lib/ipc/event_count.h"

namespace farandole::simulation {
namespace {

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kLongest = 300 * kSecond;  // of a world
constexpr uint64_t kMostTurns = 20'000'000;
// Until then each call of a broken job has ended: a wire's patience, and that of a rank that leaves.
constexpr int64_t kPatience = 4 * kSecond;
constexpr uint8_t kWorked = kDone | kAbsent;

const Config& usual_config() {
  static const Config config = [] {
    Config usual = read_config();
    usual.block_bytes = 4096;
    usual.staging_slots = 2;
    usual.spin_us = 0;
    usual.flight_dir.clear();
    usual.timeline.clear();
    usual.stack_signal = 0;
    return usual;
  }();
  return config;
}

Config config_of(const Coordinator::Settings& settings) {
  Config config = usual_config();
  config.fusion_bytes = static_cast<int64_t>(settings.fusion_bytes);
  config.cache_capacity = static_cast<int64_t>(settings.capacity);
  config.max_process_sets = settings.max_sets;
  config.stall_warn = static_cast<double>(settings.stall_warn_ns) / kSecond;
  config.stall_abort = static_cast<double>(settings.stall_abort_ns) / kSecond;
  return config;
}

}  // namespace

void Statistics::add(const Statistics& other) {
  for (size_t i = 0; i < std::size(ends); ++i) ends[i] += other.ends[i];
  turns += other.turns;
  direct += other.direct;
  buckets += other.buckets;
  duplicates += other.duplicates;
  deaths += other.deaths;
  leaders += other.leaders;
  hosts += other.hosts;
  several_hosts += other.several_hosts;
}

World::World(const Program& program, uint64_t seed, bool trace)
    : program_(program),
      trace_(trace),
      kernel_(seed ^ 0x5eed),
      random_(seed ^ 0xfa57),
      node_(settle_on_hosts()),
      fan_out_(random_.between(1, 4)),
      network_(kernel_, node_),
      syncs_(node_.size(), -1),
      rescued_(rescued_wakeups()) {
  const Config config = config_of(program.settings);
  for (Rank r = 0; r < program.settings.size; ++r) {
    PeerInfo info;
    info.host = "host" + std::to_string(node_[static_cast<size_t>(r)]);
    info.pid_namespace = static_cast<uint64_t>(r);  // no rank sees another's process
    peer_infos_.push_back(info);
    ranks_.push_back(
        std::make_unique<SimulatedRank>(program, Topology::of(r, node_), config, *this));
    kernel_.spawn(r, [this, r] { ranks_[static_cast<size_t>(r)]->live(); });
  }
  make_faults();
}

World::~World() {
  for (Rank rank : dead_) ranks_[static_cast<size_t>(rank)].reset();
}

// Every other world has several hosts; their ranks lie anyhow, and so few link to one that there are levels.
std::vector<Rank> World::settle_on_hosts() {
  const int size = program_.settings.size;
  std::vector<Rank> node(static_cast<size_t>(size), 0);
  if (size < 2 || random_.chance(0.5)) {
    statistics_.hosts = 1;
    return node;
  }
  const int hosts = random_.between(2, std::min(size, 6));
  const bool in_turns = random_.chance(0.5);
  for (Rank r = 0; r < size; ++r) {
    const int host = in_turns ? r % hosts : r * hosts / size;
    node[static_cast<size_t>(r)] = in_turns ? host : (host * size + hosts - 1) / hosts;
  }
  statistics_.hosts = hosts;
  statistics_.several_hosts = 1;
  return node;
}

// Some ranks are slow.
void World::make_faults() {
  if (random_.chance(0.3)) {
    kernel_.slow_down(random_.between(0, program_.settings.size - 1), random_.between(2, 50));
  }
}

void World::start(const SimulatedRank& rank, const Config& config,
                  std::unique_ptr<Runtime>& runtime) {
  const Topology& topology = rank.topology;
  auto& own = configs_.try_emplace(topology.rank, config).first->second;
  auto fabric = std::make_unique<Fabric>(own, topology, peer_infos_, JobKey{}, nullptr);
  BackendFactory sizes(own, topology, *fabric, {});
  const SegmentSize staging = sizes.staging_size(kWorldSet, numbers_below(topology.size));
  fabric->use(network_.connect(topology, staging, fan_out_));
  Fabric& connected = *fabric;
  runtime = std::make_unique<Runtime>(own, topology, peer_infos_, std::move(fabric));
  network_.open(topology.rank, [&connected] { connected.wakeup().notify(); });
  if (++up_ == ranks_.size()) kernel_.wake_all(kUp);
  while (up_ < ranks_.size()) kernel_.sleep_for(kUp, std::numeric_limits<int64_t>::max());
}

Statistics World::run() {
  while (!all_done()) {
    if (up_ == ranks_.size()) {
      ++turns_;
      let_die();
    }
    if (!kernel_.step() && !all_done()) give_up("nothing happens any more");
    if (kernel_.now_ns() > kLongest) give_up("the world does not end");
    if (turns_ > kMostTurns) give_up("the world does not come to rest");
  }
  if (rescued_wakeups() != rescued_) give_up("a wake-up was lost");
  check_calls();
  statistics_.turns = static_cast<int64_t>(turns_);
  return statistics_;
}

bool World::all_done() const {
  return std::ranges::all_of(ranks_, [this](const auto& rank) {
    return rank->done() || dead_.contains(rank->topology.rank);
  });
}

void World::give_up(const std::string& why) const {
  std::string text = why;
  for (const auto& rank : ranks_) {
    if (!rank->done() && !dead_.contains(rank->topology.rank)) text += "\n  " + rank->where();
  }
  for (Rank rank : dead_) text += "\n  rank " + std::to_string(rank) + " is dead";
  check::fail(text);
}

// ---- Deaths

void World::let_die() {
  while (!dooms_.empty() && dooms_.begin()->first <= turns_) {
    const Rank rank = dooms_.begin()->second;
    dooms_.erase(dooms_.begin());
    const SimulatedRank& doomed = *ranks_[static_cast<size_t>(rank)];
    if (doomed.left() || dead_.contains(rank) || living() == 1) continue;
    die(rank);
    ++statistics_.deaths;
    statistics_.leaders += doomed.topology.local_rank == 0 && doomed.topology.local_size() > 1;
  }
}

void World::die(Rank rank) {
  if (trace_) {
    std::fprintf(stderr, "%10.6f s: %s dies\n", static_cast<double>(kernel_.now_ns()) / kSecond,
                 ranks_[static_cast<size_t>(rank)]->where().c_str());
  }
  dead_.insert(rank);
  job_breaks();
  kernel_.drop(rank);
  network_.lose(rank, kernel_.delay(2'000'000));
  for (Rank peer : ranks_[static_cast<size_t>(rank)]->topology.local) {
    if (peer == rank) continue;
    kernel_.at(kernel_.now_ns() + kernel_.delay(2'000'000),
               [this, peer, rank] { tell(peer, rank); });
  }
}

// As DeathWatch does.
void World::tell(Rank to, Rank dead) {
  Runtime* runtime = ranks_[static_cast<size_t>(to)]->runtime();
  if (!runtime || dead_.contains(to)) return;
  runtime->lose(dead, {ErrorCode::kPeer, "rank " + std::to_string(dead) + " died"});
}

void World::die_now(Rank rank) {
  kernel_.at(kernel_.now_ns(), [this, rank] { die(rank); });
  for (;;)
    kernel_.sleep_for(kPauses + 1 + static_cast<uint64_t>(rank),
                      std::numeric_limits<int64_t>::max());
}

void World::job_breaks() {
  if (broken_ns_ == 0) broken_ns_ = kernel_.now_ns();
}

void World::check_in_time(int64_t begun_ns) {
  const int64_t since = std::max(begun_ns, broken_ns_);
  if (broken_ns_ != 0 && kernel_.now_ns() - since > kPatience) {
    give_up("a call of a broken job ends after " + std::to_string(kernel_.now_ns() - since) +
            " ns");
  }
}

// ---- The oracle

void World::reach(Rank rank, int64_t sync) {
  syncs_[static_cast<size_t>(rank)] = sync;
  const int64_t least = *std::ranges::min_element(syncs_);
  if (least <= passed_) return;
  passed_ = least;
  kernel_.wake_all(kSyncs);
}

// All ranks agree whether a call has worked.
void World::check_calls() {
  const bool aborted = broken_ns_ != 0;
  for (size_t c = 0; c < program_.calls.size(); ++c) {
    uint8_t ends = 0;
    for (const auto& rank : ranks_) {
      if (dead_.contains(rank->topology.rank)) continue;
      const uint8_t end = rank->outcome(static_cast<int>(c));
      ++statistics_.ends[end];
      if (!rank->leaves_early()) ends |= end;
    }
    if (aborted) continue;  // it may come between two ranks' ends of one bucket
    // The last ranks may change a set without those that have given it up and left.
    const uint8_t failed =
        spares_the_left(program_.calls[c].request) ? ~kWorked & ~kStalled : ~kWorked;
    if ((ends & kWorked) != 0 && (ends & failed) != 0) {
      check::fail("call " + std::to_string(c) + " '" + program_.calls[c].request.name +
                  "' works on some ranks only: outcomes " + std::to_string(ends));
    }
  }
  for (const auto& rank : ranks_) statistics_.direct += rank->direct_calls();
}

}  // namespace farandole::simulation
