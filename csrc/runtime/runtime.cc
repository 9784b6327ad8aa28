// SPDX-License-Identifier: Apache-2.0
#include "runtime/runtime.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/logging.h"
#include "kernels/kernels.h"

namespace farandole {
namespace {

Coordinator::Settings coordinator_settings(const Config& config, const Topology& topology) {
  Coordinator::Settings settings;
  settings.size = topology.size;
  settings.fusion_bytes = static_cast<size_t>(config.fusion_bytes);
  settings.gpu_fusion_bytes = static_cast<size_t>(config.gpu_fusion_bytes);
  settings.gpu_backend = config.gpu_backend;
  settings.gpu_order = config.gpu_order;
  settings.shared_gpu = config.shared_gpu;
  settings.capacity = static_cast<size_t>(config.cache_capacity);
  settings.average_active = config.join_average == "active";
  settings.check_sites = config.call_sites == "check";
  settings.max_sets = static_cast<int>(config.max_process_sets);
  settings.stall_warn_ns = nanoseconds(config.stall_warn).count();
  settings.stall_abort_ns = nanoseconds(config.stall_abort).count();
  return settings;
}

}  // namespace

Runtime::Runtime(LocalEndpoint endpoint, Topology topology, std::span<const PeerInfo> peer_infos,
                 const void* mpi_comm)
    : config_(std::move(endpoint.config)), topology_(std::move(topology)) {
  const int64_t began_ns = now_ns();
  set_log({log_level_of(config_.log_level), topology_.rank, host_name(),
           log_format_of(config_.log_format), config_.log_rate});
  kernels::select_target(config_.cpu_target);
  check_agreement(peer_infos);
  apply_job_wide_text(config_, peer_infos[0].job_wide);

  const Deadline deadline = Deadline::in(nanoseconds(config_.init_timeout));
  fabric_ = std::make_unique<Fabric>(config_, topology_, peer_infos, mpi_comm);
  backends_ = std::make_unique<BackendFactory>(
      config_, topology_, *fabric_, [this](SetId set) { return watch_->phases_of(set); });
  fabric_->share_memory(endpoint.listener, std::move(endpoint.to_leader), peer_infos,
                        backends_->staging_bytes(numbers_below(topology_.size)), deadline);
  watch_ = std::make_unique<RankWatch>(config_, topology_, *fabric_, peer_infos, endpoint.stacks,
                                       began_ns, deadline);
  fabric_->share_arena(std::move(endpoint.arena), deadline);
  fabric_->link_hosts(std::move(endpoint.hosts), std::move(endpoint.ends), peer_infos, deadline);
  channel_ = std::make_unique<MemberChannel>(fabric_->control(), topology_.local_rank);
  if (fabric_->leads()) open_leader();
  open_engine();
  fabric_->links().barrier(deadline);
  // Right after the barrier, because a peer may end from then on.
  watch_->start(peer_infos, [this](Rank rank, Failure failure) {
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
    watch_->stop();  // before the objects that its callback uses
    throw;
  }
}

Runtime::~Runtime() {
  driver_->stop();
  fabric_->finish(Deadline::in(nanoseconds(config_.leave_timeout)));
  watch_->stop();
}

void Runtime::open_leader() {
  HostController::Setup setup{
      LeaderChannel(fabric_->control(), topology_.local),
      fabric_->hosts(),
      fabric_->tree(),
      fabric_->links(),
      topology_,
      fabric_->host_names(),
      [this](const std::vector<Rank>& ranks) { return backends_->staging_bytes(ranks); },
      [this](Rank rank) { return watch_->why_standing(rank); }};
  if (topology_.rank == 0) {
    leader_ = std::make_unique<RootController>(
        coordinator_settings(config_, topology_), std::move(setup),
        [this](const std::string& notice) { watch_->dump_host(notice); },
        [this](Rank rank, int64_t ns) { watch_->recorder().late(rank, ns); });
  } else {
    leader_ = std::make_unique<HostRelay>(std::move(setup));
  }
}

void Runtime::open_engine() {
  // Rank 0's host has no relay that batches reports.
  calls_ = std::make_unique<RankCalls>(RankCalls::Setup{
      topology_.rank, *channel_, topology_.leader() != 0, topology_.local_size() == topology_.size,
      watch_->recorder(),
      // The first failure of a kind may explain later ones, while a script may handle the same error again and again.
      [this, told = std::set<ErrorCode>()](const Failure& failure) mutable {
        const bool ends_well = failure.code == ErrorCode::kShutdown;
        if (!ends_well && told.insert(failure.code).second) watch_->dump_own(failure.text);
      }});
  engine_ = std::make_unique<Engine>(Engine::Setup{
      topology_, fabric_->links(), *channel_, leader_.get(), *calls_, watch_->recorder(),
      [this](SetId id, const ProcessSet& set, Segment& staging, Feeds feeds) {
        return backends_->open_lane(id, set, staging, feeds);
      },
      fabric_->take_staging(),
      [this] {
        watch_->ask_for_stacks(
            [this](std::string text) { calls_->report(StackReport{false, std::move(text)}); });
      },
      [this](const std::string& text) { watch_->tell_finding(text); }});
  gpus_ = std::make_unique<GpuAccess>(
      config_, calls_->handles, [this] { fabric_->wakeup().notify(); },
      [this](RankGpu& gpu) { engine_->use_gpu(gpu); });
  driver_ = std::make_unique<Driver>(
      Driver::Setup{*engine_, *calls_, *watch_, fabric_->wakeup(), *channel_, fabric_->leads(),
                    Spin(config_.spin_us, topology_.local_size()), config_.priority == "realtime"});
  submitter_ = std::make_unique<Submitter>(topology_.rank, config_.check_numerics != 0, *calls_,
                                           *gpus_, *driver_);
  leaver_ = std::make_unique<Leaver>(config_, *calls_, *driver_, *watch_);
}

std::vector<Rank> Runtime::ranks_of(SetId set) {
  std::optional<ProcessSet> found = calls_->find_set(set);
  if (!found) {
    throw Error(ErrorCode::kInvalidArgument, "there is no process set " + std::to_string(set));
  }
  return std::move(found->ranks);
}

}  // namespace farandole
