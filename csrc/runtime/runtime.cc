// SPDX-License-Identifier: Apache-2.0
// How a runtime begins and ends. What happens in between is in runtime_submit.cc and
// runtime_work.cc.
#include "runtime/runtime.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/log_json.h"
#include "control/hosts/host_linking.h"
#include "control/hosts/leader.h"
#include "control/hosts/relay.h"
#include "kernels/kernels.h"
#include "lib/os/process.h"
#include "lib/os/thread.h"

namespace farandole {
namespace {

std::chrono::nanoseconds seconds(double s) {
  return std::chrono::nanoseconds(static_cast<int64_t>(std::min(s, 1e9) * 1e9));
}

void check_choice(const char* name, const std::string& value,
                  std::initializer_list<const char*> choices) {
  std::string all;
  for (const char* choice : choices) {
    if (value == choice) return;
    all += (all.empty() ? "" : ", ") + std::string(choice);
  }
  throw Error(ErrorCode::kInvalidArgument,
              std::string(name) + "='" + value + "' is none of " + all);
}

Coordinator::Settings coordinator_settings(const Config& config, const Topology& topology) {
  Coordinator::Settings settings;
  settings.size = topology.size;
  settings.bundle_tiny = topology.local_size() == topology.size;
  settings.fusion_bytes = static_cast<size_t>(std::max<int64_t>(config.fusion_bytes, 0));
  settings.gpu_fusion_bytes = static_cast<size_t>(std::max<int64_t>(config.gpu_fusion_bytes, 0));
  check_choice("FARANDOLE_GPU_PLANE", config.gpu_plane, {"auto", "nccl", "host"});
  check_choice("FARANDOLE_SHARED_GPU", config.shared_gpu, {"error", "host", "nccl"});
  check_choice("FARANDOLE_GPU_ORDER", config.gpu_order, {"background", "program"});
  settings.gpu_plane = config.gpu_plane;
  settings.gpu_order = config.gpu_order;
  settings.shared_gpu = config.shared_gpu;
  settings.capacity = static_cast<size_t>(std::max<int64_t>(config.cache_capacity, 1));
  check_choice("FARANDOLE_JOIN_AVERAGE", config.join_average, {"all", "active"});
  settings.average_active = config.join_average == "active";
  settings.max_sets = static_cast<int>(config.max_process_sets);
  settings.stall_warn_ns = seconds(config.stall_warn).count();
  settings.stall_abort_ns = seconds(config.stall_abort).count();
  settings.bundles = static_cast<int>(std::clamp<int64_t>(config.bundles, 0, 1000));
  return settings;
}

std::string why_standing(pid_t pid) {
  if (pid == 0 || !is_stopped(pid)) return {};
  return "pid " + std::to_string(pid) + ": `kill -CONT " + std::to_string(pid) + "` lets it go on";
}

}  // namespace

Door::Door(Config its_config, StackSource its_stacks, std::shared_ptr<Arena> its_arena)
    : config(std::move(its_config)),
      key(random_key()),
      listener(key),
      hosts(),
      stacks(its_stacks),
      arena(std::move(its_arena)) {}

Rank Door::knock(Rank own, const std::vector<Rank>& node, std::span<const Card> cards) {
  constexpr std::chrono::seconds kPatience{5};
  const Rank leader = nearest_leader(own, node, cards);
  if (leader == own) return own;
  const Card& card = cards[static_cast<size_t>(leader)];
  try {
    to_leader = std::make_unique<UnixSocket>(
        UnixSocket::connect(card.door, card.key, Deadline::in(kPatience)));
    return leader;
  } catch (const Error& error) {
    log(LogLevel::kWarning, "rank " + std::to_string(own) + " shares no memory with rank " +
                                std::to_string(leader) + " on the same host: " + error.what());
    return own;
  }
}

Runtime::Runtime(Door door, Topology topology, std::span<const Card> cards, const void* mpi_comm)
    : config_(std::move(door.config)),
      topology_(std::move(topology)),
      spin_(config_.spin_us, topology_.local_size()) {
  const int64_t began_ns = now_ns();
  set_log({log_level_of(config_.log_level), topology_.rank, host_name(),
           log_format_of(config_.log_format), config_.log_rate});
  kernels::select_target(config_.cpu_target);
  check_choice("FARANDOLE_PRIORITY", config_.priority, {"normal", "realtime"});
  check_agreement(cards);
  apply_job_wide_text(config_, cards[0].job_wide);

  Deadline deadline = Deadline::in(seconds(config_.init_timeout));
  if (topology_.local_size() < topology_.size && mpi_comm != nullptr) {
    mpi_ = MpiComm::borrow(mpi_comm);
  }
  for (const Card& card : cards) host_names_.push_back(card.host);
  links_ = HostLinks(topology_, cards, door.listener, std::move(door.to_leader), deadline);
  std::vector<int> locals(topology_.local.size());
  for (size_t i = 0; i < locals.size(); ++i) locals[i] = static_cast<int>(i);
  Segment staging;
  if (links_.leads()) {
    control_ =
        links_.give("farandole-control", ShmLayout::bytes_needed(topology_.local_size()), locals);
    std::vector<Rank> world(static_cast<size_t>(topology_.size));
    std::iota(world.begin(), world.end(), 0);
    staging = links_.give("farandole-staging", staging_bytes(world), locals);
    flight_ =
        links_.give("farandole-flight",
                    FlightMemory::bytes_needed(topology_.local_size(), topology_.size), locals);
  } else {
    control_ = links_.receive(deadline);
    staging = links_.receive(deadline);
    flight_ = links_.receive(deadline);
  }
  witness_ = std::make_unique<Witness>(door.stacks);
  open_recorder(began_ns, deadline);
  open_arenas(std::move(door.arena), deadline);
  meet_hosts(std::move(door.hosts), cards, deadline);
  open_engine(cards, std::move(staging));
  links_.barrier(deadline);
  begin_timeline();
  watch_ = std::make_unique<DeathWatch>(peers(cards),
                                        [this](const DeathWatch::Peer& p) { on_death(p); });
  thread_ = start_thread("farandole", [this] { background(); });
  scheduled_.wait();
}

Runtime::~Runtime() {
  quit_ = true;
  if (thread_.joinable()) {
    bell_->notify_background();
    thread_.join();
  }
  say_last();
  if (hosts_) hosts_->finish(Deadline::in(seconds(config_.leave_timeout)));
  watch_.reset();
  witness_.reset();
}

void Runtime::open_arenas(std::shared_ptr<Arena> own, Deadline deadline) {
  const int ranks = topology_.local_size();
  if (ranks == 1) return;
  std::vector<int> locals(static_cast<size_t>(ranks));
  std::iota(locals.begin(), locals.end(), 0);
  arena_directory_ =
      links_.leads() ? links_.give("farandole-arenas", ArenaDirectory::bytes_needed(ranks), locals)
                     : links_.receive(deadline);
  std::vector<Fd> fds = links_.share(own->fd(), deadline);
  arenas_ = std::make_unique<HostArenas>(std::move(own), topology_.local_rank, std::move(fds),
                                         ArenaDirectory(arena_directory_.data(), ranks));
}

// The leaders of hosts link up, each with the one above it and those below.
void Runtime::meet_hosts(TcpListener listener, std::span<const Card> cards, Deadline deadline) {
  ShmLayout layout(control_.data(), topology_.local_size());
  bells_ = layout.bells();
  bell_ = layout.bell(topology_.local_rank);
  if (!links_.leads() || topology_.local_size() == topology_.size) return;
  tree_ = HostTree::of(topology_.rank, topology_.node);
  HostLinking linking;
  linking.rank = topology_.rank;
  linking.above = tree_.parent;
  for (const HostTree::Branch& child : tree_.children) linking.below.push_back(child.leader);
  linking.cards = cards;
  linking.way = config_.channel;
  linking.mpi = mpi_.get();
  linking.peer_timeout =
      std::chrono::duration_cast<std::chrono::milliseconds>(seconds(config_.peer_timeout));
  linking.notify = [this] { bell_->notify(); };
  hosts_ = link_hosts(linking, listener, deadline);
}

void Runtime::open_engine(std::span<const Card> cards, Segment world_staging) {
  ShmLayout layout(control_.data(), topology_.local_size());
  channel_ = std::make_unique<ShmMember>(layout, topology_.local_rank);
  if (links_.leads()) {
    HostLeader::Setup setup{std::make_unique<ShmLeader>(layout, topology_.local),
                            hosts_.get(),
                            tree_,
                            links_,
                            topology_,
                            host_names_,
                            [this](const std::vector<Rank>& ranks) { return staging_bytes(ranks); },
                            [pids = pids_in_sight(cards)](Rank rank) {
                              return why_standing(pids[static_cast<size_t>(rank)]);
                            }};
    if (topology_.rank == 0) {
      leader_ = std::make_unique<Leader>(
          coordinator_settings(config_, topology_), std::move(setup),
          [this](const std::string& notice) { dump_host(notice); },
          [this](Rank rank, int64_t ns) { recorder_->late(rank, ns); });
    } else {
      leader_ = std::make_unique<Relay>(std::move(setup));
    }
  }
  const Rank leader = topology_.leader();
  const pid_t pid = leader_ ? 0 : pids_in_sight(cards)[static_cast<size_t>(leader)];
  leader_stands_ = std::make_unique<Standstill>(leader, pid, seconds(config_.stall_warn).count(),
                                                seconds(config_.stall_abort).count());
  engine_ = std::make_unique<Engine>(
      Engine::Setup{topology_, links_, *channel_, leader_.get(), *recorder_,
                    [this](const Failure& failure) { dump_own(failure.text); },
                    [this](SetId id, const ProcessSet& set, Segment& staging) {
                      return open_lane(id, set, staging);
                    },
                    std::move(world_staging),
                    [this] {
                      witness_->ask([this](std::string text) {
                        engine_->report(Whereabouts{false, std::move(text)});
                      });
                    }});
}

bool Runtime::leave(bool failed, const std::string& why, Deadline deadline) {
  std::call_once(leave_once_, [&] {
    leaving_ = true;
    // Leaving a broken job is part of its end, not a normal one.
    bool broken = engine_->broken();
    leave_deadline_ =
        failed || broken ? Deadline::in(seconds(config_.leave_timeout)) : Deadline::never();
    engine_->report(Leave{failed || broken, broken ? engine_->failure().text : why});
    after_submit();
  });
  auto over = [this] {
    return engine_->stopped() || engine_->broken() || leave_deadline_.expired();
  };
  if (!failed) recorder_->left();
  if (!await(over, std::min(deadline, leave_deadline_)) && !over()) return false;
  engine_->fail({ErrorCode::kShutdown, "shutdown() was called while this call was under way"});
  bell_->notify();
  // Whoever drives tells everything that still waits. No signal ends this.
  while (!await([this] { return engine_->broken(); }, Deadline::never())) {
  }
  return true;
}

}  // namespace farandole
