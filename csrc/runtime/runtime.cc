// SPDX-License-Identifier: Apache-2.0
#include "runtime/runtime.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/log_json.h"
#include "control/hosts/leader.h"
#include "control/hosts/relay.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

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
  settings.stall_warn_ns = nanoseconds(config.stall_warn).count();
  settings.stall_abort_ns = nanoseconds(config.stall_abort).count();
  settings.bundles = static_cast<int>(std::clamp<int64_t>(config.bundles, 0, 1000));
  return settings;
}

}  // namespace

Runtime::Runtime(Door door, Topology topology, std::span<const Card> cards, const void* mpi_comm)
    : config_(std::move(door.config)), topology_(std::move(topology)) {
  const int64_t began_ns = now_ns();
  set_log({log_level_of(config_.log_level), topology_.rank, host_name(),
           log_format_of(config_.log_format), config_.log_rate});
  kernels::select_target(config_.cpu_target);
  check_choice("FARANDOLE_PRIORITY", config_.priority, {"normal", "realtime"});
  check_agreement(cards);
  apply_job_wide_text(config_, cards[0].job_wide);
  check_choice("FARANDOLE_WIRE", config_.wire, {"auto", "tcp", "mpi"});

  const Deadline deadline = Deadline::in(nanoseconds(config_.init_timeout));
  fabric_ = std::make_unique<Fabric>(config_, topology_, cards, mpi_comm);
  planes_ = std::make_unique<PlaneFactory>(config_, topology_, *fabric_,
                                           [this](SetId set) { return watch_->phases_of(set); });
  std::vector<Rank> world(static_cast<size_t>(topology_.size));
  std::iota(world.begin(), world.end(), 0);
  fabric_->share_memory(door.listener, std::move(door.to_leader), cards,
                        planes_->staging_bytes(world), deadline);
  watch_ = std::make_unique<RankWatch>(config_, topology_, *fabric_, cards, door.stacks, began_ns,
                                       deadline);
  fabric_->share_arena(std::move(door.arena), deadline);
  fabric_->link_hosts(std::move(door.hosts), cards, deadline);
  channel_ = std::make_unique<ShmMember>(fabric_->control(), topology_.local_rank);
  if (fabric_->leads()) open_leader();
  open_engine();
  fabric_->links().barrier(deadline);
  // At once: a peer may end as soon as it is through the barrier.
  watch_->start(cards, [this](Rank rank, Failure failure) {
    if (leader_) {
      leader_->lose(rank, std::move(failure));
    } else if (rank == topology_.leader()) {
      calls_->job.fail(std::move(failure));
    }
    driver_->ring();
  });
  try {
    driver_->start();
  } catch (...) {
    watch_->stop();  // before what its thread would tell of deaths
    throw;
  }
}

Runtime::~Runtime() {
  driver_->stop();
  fabric_->finish(Deadline::in(nanoseconds(config_.leave_timeout)));
  watch_->stop();
}

void Runtime::open_leader() {
  HostLeader::Setup setup{
      std::make_unique<ShmLeader>(fabric_->control(), topology_.local),
      fabric_->hosts(),
      fabric_->tree(),
      fabric_->links(),
      topology_,
      fabric_->host_names(),
      [this](const std::vector<Rank>& ranks) { return planes_->staging_bytes(ranks); },
      [this](Rank rank) { return watch_->why_standing(rank); }};
  if (topology_.rank == 0) {
    leader_ = std::make_unique<Leader>(
        coordinator_settings(config_, topology_), std::move(setup),
        [this](const std::string& notice) { watch_->dump_host(notice); },
        [this](Rank rank, int64_t ns) { watch_->recorder().late(rank, ns); });
  } else {
    leader_ = std::make_unique<Relay>(std::move(setup));
  }
}

void Runtime::open_engine() {
  // The leader of rank 0's host gathers nothing.
  calls_ = std::make_unique<RankCalls>(topology_.rank, *channel_, topology_.leader() != 0);
  engine_ = std::make_unique<Engine>(Engine::Setup{
      topology_, fabric_->links(), *channel_, leader_.get(), *calls_, watch_->recorder(),
      [this](const Failure& failure) { watch_->dump_own(failure.text); },
      [this](SetId id, const ProcessSet& set, Segment& staging, Feeds feeds) {
        return planes_->open_lane(id, set, staging, feeds);
      },
      fabric_->take_staging(),
      [this] {
        watch_->ask_whereabouts(
            [this](std::string text) { calls_->report(Whereabouts{false, std::move(text)}); });
      }});
  gpus_ = std::make_unique<GpuAccess>(
      config_, calls_->handles, [this] { fabric_->bell().notify(); },
      [this](RankGpu& gpu) {
        std::lock_guard lock(calls_->mutex);
        engine_->use_gpu(gpu);
      });
  driver_ = std::make_unique<Driver>(
      Driver::Setup{*engine_, *calls_, fabric_->bell(), *channel_, fabric_->leads(),
                    Spin(config_.spin_us, topology_.local_size()), config_.priority == "realtime"});
  submitter_ = std::make_unique<Submitter>(topology_.rank, config_.check_numerics != 0, *calls_,
                                           *gpus_, *driver_, watch_->recorder());
  waiter_ = std::make_unique<Waiter>(*calls_, *driver_, engine_->gpu(), *watch_);
  leaver_ = std::make_unique<Leaver>(config_, *calls_, *submitter_, *driver_, *watch_);
}

std::vector<Rank> Runtime::ranks_of(SetId set) {
  std::lock_guard lock(calls_->mutex);
  ProcessSet* found = calls_->sets.find(set);
  if (!found) {
    throw Error(ErrorCode::kInvalidArgument, "there is no process set " + std::to_string(set));
  }
  return found->ranks;
}

}  // namespace farandole
