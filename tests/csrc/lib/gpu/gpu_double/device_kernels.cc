// SPDX-License-Identifier: Apache-2.0
#include "lib/gpu/gpu_double/device_kernels.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <sstream>
#include <thread>

#include "lib/gpu/gpu_double/device_layout.h"
#include "lib/gpu/gpu_double/device_ring.h"
#include "lib/gpu/gpu_double/gpu_double.h"

struct CUfunc_st {
  std::string name;
};

namespace farandole::check {
namespace {

NcclCode code;
std::map<const void*, std::unique_ptr<CUfunc_st>> kernels;

[[noreturn]] void unknown(const std::string& what) {
  std::fprintf(stderr, "GPU double: it has no code for NCCL's %s\n", what.c_str());
  std::abort();
}

using namespace device;

// One channel's share of a collective.
struct Part {
  size_t all, start, count, chunk;  // elements
};

template <class Row, size_t n>
const Row& row_of(const Row (&layouts)[n]) {
  const Row* found = nullptr;
  for (const Row& layout : layouts) {
    if (code.version >= layout.from) found = &layout;
  }
  if (!found) unknown("version " + std::to_string(code.version));
  return *found;
}
const Layout& layout() { return row_of(kLayouts); }

size_t bytes_of_work(uint32_t type) {
  if (type == kTransfers) return sizeof(Transfers);
  if (type == kCollective) return layout().work;
  unknown("work of type " + std::to_string(type));
}

class ChannelRun {
 public:
  ChannelRun(const std::vector<std::byte>& arguments, int number, size_t block)
      : arguments_(arguments), number_(number), block_(block) {
    std::memcpy(&head_, arguments.data(), sizeof head_);
    communicator_ = reinterpret_cast<const Communicator*>(head_.communicator);
    channel_ = reinterpret_cast<const Channel*>(head_.communicator + kChannels +
                                                static_cast<size_t>(number) * kChannelBytes);
  }

  // Batches that extend each other are one.
  void run() const {
    for (size_t at = block_;;) {
      std::vector<std::vector<std::byte>> works;
      Batch batch;
      for (;; at += batch.jump) {
        std::memcpy(&batch, arguments_.data() + sizeof(Arguments) + at * sizeof batch,
                    sizeof batch);
        take(batch, works);
        if (!batch.extends) break;
      }
      const Function function(code.functions.at(batch.function));
      if (!function.is_simple_ring) unknown("function " + code.functions[batch.function]);
      if (batch.type == kTransfers) {
        transfer(works);
      } else {
        for (const auto& work : works) collective(function, work);
      }
      if (batch.jump == 0) return;
      at += batch.jump;
    }
  }

 private:
  void take(const Batch& batch, std::vector<std::vector<std::byte>>& works) const {
    const size_t bytes = bytes_of_work(batch.type);
    for (size_t bit = 0; bit < 64; ++bit) {
      if ((batch.works >> bit & 1) == 0) continue;
      const size_t offset = batch.offset + bit * bytes;
      std::vector<std::byte> work(bytes);
      for (size_t i = 0; i < bytes; i += 16) {  // a ring of pieces of 16 bytes
        const std::byte* const from = head_.storage == 0
                                          ? arguments_.data() + offset + i
                                          : head_.works + ((offset + i) & head_.mask);
        std::memcpy(work.data() + i, from, 16);
      }
      works.push_back(std::move(work));
    }
  }

  Connection* from(int peer, int index) const { return &channel_->peers[peer]->receive[index]; }
  Connection* to(int peer, int index) const { return &channel_->peers[peer]->send[index]; }

  Part part_of(const CollectiveHead& head, const CollectiveCounts& counts, size_t size) const {
    const size_t grain = kGrain / size;
    const auto first = static_cast<int>(head.first_channel);
    const auto last = static_cast<int>(head.last_channel);
    const auto between = static_cast<size_t>(std::max(0, last - first - 1));
    const size_t all = counts.first + counts.middle * between + counts.last;
    if (number_ == first) return {all, 0, counts.first, counts.grains_first * grain};
    const auto before = static_cast<size_t>(number_ - first - 1);
    const size_t start = counts.first + before * counts.middle;
    if (number_ == last) return {all, start, counts.last, counts.grains_last * grain};
    return {all, start, counts.middle, counts.grains_middle * grain};
  }

  void collective(const Function& function, const std::vector<std::byte>& work) const {
    CollectiveHead head;
    CollectiveBuffers buffers;
    CollectiveCounts counts;
    uint64_t scale;
    std::memcpy(&head, work.data(), sizeof head);
    std::memcpy(&buffers, work.data() + layout().buffers, sizeof buffers);
    std::memcpy(&counts, work.data() + layout().counts, sizeof counts);
    std::memcpy(&scale, work.data() + layout().scale, sizeof scale);
    if (head.registered || head.network_registered || head.scale_is_pointer) {
      unknown("registered buffers");
    }
    const Reduction reduction(function, scale);
    const bool by_parts = function.what != "Broadcast" && function.what != "Reduce";
    Link link(*communicator_, from(channel_->ring.previous, 0), to(channel_->ring.next, 0),
              by_parts ? Link::Steps{2, 2} : Link::Steps{1, 1},
              communicator_->buffer_bytes[kSimple] / kSteps, &reduction);
    const RingWork ring{buffers, part_of(head, counts, reduction.size()), reduction.size(),
                        static_cast<int>(head.root)};
    if (function.what == "AllReduce") return all_reduce(link, ring);
    if (function.what == "AllGather") return all_gather(link, ring);
    if (function.what == "ReduceScatter") return reduce_scatter(link, ring);
    if (function.what == "Broadcast") return broadcast(link, ring);
    if (function.what == "Reduce") return reduce(link, ring);
    unknown(function.what);
  }

  struct RingWork {
    CollectiveBuffers buffers;
    Part part;
    size_t size;
    int root;
    const std::byte* input(size_t element) const { return buffers.input + element * size; }
    std::byte* output(size_t element) const { return buffers.output + element * size; }
  };

  // The rank that is `places` after this one in the ring.
  size_t after(int places) const {
    return static_cast<size_t>(channel_->ring.ranks[places % communicator_->ranks]);
  }

  // By places in the ring, not by ranks.
  void all_reduce(Link& link, const RingWork& work) const {
    const int ranks = communicator_->ranks;
    const auto n = static_cast<size_t>(ranks);
    const auto mine = static_cast<size_t>(place());
    size_t chunk = work.part.chunk;
    for (size_t done = 0; done < work.part.count; done += n * work.part.chunk) {
      const size_t left = work.part.count - done;
      if (left < n * chunk) {
        const size_t pack = 16 / work.size;
        chunk = ((left + n - 1) / n + pack - 1) / pack * pack;
      }
      const auto piece = [&](size_t from_mine) {
        const size_t start = (mine + from_mine) % n * chunk;
        return std::pair(work.part.start + done + start,
                         std::min(chunk, left - std::min(left, start)));
      };
      for (int j = 1; j < ranks; ++j) {
        const auto [at, count] = piece(n - static_cast<size_t>(j));
        link.move(work.input(at), j > 1, nullptr, true, count);
      }
      const auto [at, count] = piece(0);
      link.move(work.input(at), true, work.output(at), true, count, /*last=*/true);
      for (int j = 1; j < ranks; ++j) {
        const auto [to, length] = piece(n - static_cast<size_t>(j));
        link.move(nullptr, true, work.output(to), j < ranks - 1, length);
      }
    }
  }

  void all_gather(Link& link, const RingWork& work) const {
    const int ranks = communicator_->ranks;
    for (size_t done = 0; done < work.part.count; done += work.part.chunk) {
      const size_t count = std::min(work.part.chunk, work.part.count - done);
      const size_t at = work.part.start + done;
      link.move(work.input(at), false, work.output(at + after(0) * work.part.all), true, count);
      for (int j = 1; j < ranks; ++j) {
        const size_t to = at + after(ranks - j) * work.part.all;
        link.move(nullptr, true, work.output(to), j < ranks - 1, count);
      }
    }
  }

  void reduce_scatter(Link& link, const RingWork& work) const {
    const int ranks = communicator_->ranks;
    for (size_t done = 0; done < work.part.count; done += work.part.chunk) {
      const size_t count = std::min(work.part.chunk, work.part.count - done);
      const size_t at = work.part.start + done;
      for (int j = 1; j < ranks; ++j) {
        const size_t of = at + after(ranks - j) * work.part.all;
        link.move(work.input(of), j > 1, nullptr, true, count);
      }
      link.move(work.input(at + after(0) * work.part.all), true, work.output(at), false, count,
                /*last=*/true);
    }
  }

  void broadcast(Link& link, const RingWork& work) const {
    const bool is_root = after(0) == static_cast<size_t>(work.root);
    const bool is_last = after(1) == static_cast<size_t>(work.root);
    for (size_t done = 0; done < work.part.count; done += work.part.chunk) {
      const size_t count = std::min(work.part.chunk, work.part.count - done);
      const size_t at = work.part.start + done;
      link.move(is_root ? work.input(at) : nullptr, !is_root, work.output(at), !is_last, count);
    }
  }

  void reduce(Link& link, const RingWork& work) const {
    const bool is_root = after(0) == static_cast<size_t>(work.root);
    const bool is_first = after(communicator_->ranks - 1) == static_cast<size_t>(work.root);
    for (size_t done = 0; done < work.part.count; done += work.part.chunk) {
      const size_t count = std::min(work.part.chunk, work.part.count - done);
      const size_t at = work.part.start + done;
      link.move(work.input(at), !is_first, is_root ? work.output(at) : nullptr, !is_root, count,
                /*last=*/is_root);
    }
  }

  // All at once: ranks wait for each other's.
  void transfer(const std::vector<std::vector<std::byte>>& works) const {
    std::atomic<bool> aborted = false;
    std::vector<std::thread> threads;
    const auto begin = [&](auto&& body) {
      threads.emplace_back([&aborted, body] {
        try {
          body();
        } catch (const Aborted&) {
          aborted = true;
        }
      });
    };
    for (const auto& bytes : works) {
      Transfers work;
      std::memcpy(&work, bytes.data(), sizeof work);
      const Extent send = extent_of(work, work.sent, work.send_channels);
      const Extent receive = extent_of(work, work.received, work.receive_channels);
      if ((send.is_mine && work.send_low_latency) ||
          (receive.is_mine && work.receive_low_latency)) {
        unknown("LL protocol: NCCL_P2P_LL_THRESHOLD=-1 keeps it off");
      }
      if (work.registered || work.network_registered) unknown("registered buffers");
      if (work.to == communicator_->rank) {
        if (send.is_mine)
          std::memmove(work.output + send.start, work.input + send.start, send.bytes);
        continue;
      }
      if (send.is_mine) begin([=, this] { send_to(work, send); });
      if (receive.is_mine) begin([=, this] { receive_from(work, receive); });
    }
    for (std::thread& thread : threads) thread.join();
    if (aborted) throw Aborted();
  }

  struct Extent {
    bool is_mine;
    size_t start, bytes;
  };

  // The part of this channel.
  Extent extent_of(const Transfers& work, size_t bytes, int channels) const {
    const int part = (number_ - work.first_channel) & (work.channels - 1);
    if (part >= channels) return {};
    constexpr size_t kUnit = 4096;
    const auto n = static_cast<size_t>(channels);
    const size_t each = ((bytes + n - 1) / n + kUnit - 1) / kUnit * kUnit;
    const size_t start = std::min(static_cast<size_t>(part) * each, bytes);
    return {true, start, std::min(start + each, bytes) - start};
  }

  static size_t chunk_of(uint8_t bits) {
    const uint32_t exponent = bits >> 3;
    const uint32_t mantissa = (bits & 7U) | (exponent ? 8U : 0U);
    return size_t{mantissa} << (exponent ? exponent - 1 : 0);
  }

  void send_to(const Transfers& work, const Extent& extent) const {
    const Reduction copy(Function("SendRecv"), 0);
    Link link(*communicator_, nullptr, to(work.to, 1), {1, 1},
              communicator_->step_bytes_of_transfers, &copy);
    const size_t chunk = chunk_of(work.send_chunk);
    for (size_t done = 0; done == 0 || done < extent.bytes; done += chunk) {
      link.move(work.input + extent.start + done, false, nullptr, true,
                std::min(chunk, extent.bytes - done));
    }
  }

  void receive_from(const Transfers& work, const Extent& extent) const {
    const Reduction copy(Function("SendRecv"), 0);
    Link link(*communicator_, from(work.from, 1), nullptr, {1, 1},
              communicator_->step_bytes_of_transfers, &copy);
    const size_t chunk = chunk_of(work.receive_chunk);
    for (size_t done = 0; done == 0 || done < extent.bytes; done += chunk) {
      link.move(nullptr, true, work.output + extent.start + done, false,
                std::min(chunk, extent.bytes - done));
    }
  }

  int place() const {
    const auto* const ring = reinterpret_cast<const std::byte*>(&channel_->ring);
    return *reinterpret_cast<const int*>(ring + layout().place);
  }

  const std::vector<std::byte>& arguments_;
  int number_;
  size_t block_;
  Arguments head_;
  const Communicator* communicator_;
  const Channel* channel_;
};

template <class T>
T read_at(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// NCCL's kernel for a communicator of one rank.
struct OneRank {
  std::byte* output;
  const std::byte* input;
  size_t count;
  uint64_t scale;
  bool scale_is_pointer;
};

void run_one_rank(const std::string& name, const OneRank& work) {
  if (work.scale_is_pointer) unknown("scale in device memory");
  Reduction(Function(name), work.scale).apply(work.output, work.input, nullptr, work.count, true);
}

}  // namespace

const NcclCode& nccl_code() { return code; }

cuda::Function kernel_of(const void* host_function) {
  const auto found = kernels.find(host_function);
  return found == kernels.end() ? nullptr : found->second.get();
}

void run_channels(const std::vector<std::byte>& arguments) {
  Arguments head;
  std::memcpy(&head, arguments.data(), sizeof head);
  std::vector<std::thread> threads;
  size_t block = 0;
  for (int number = 0; number < kMaxChannels; ++number) {
    if ((head.channels >> number & 1) == 0) continue;
    threads.emplace_back([&arguments, number, block] {
      try {
        ChannelRun(arguments, number, block).run();
      } catch (const Aborted&) {
      }
    });
    ++block;
  }
  for (std::thread& thread : threads) thread.join();
}

void push_thread(Hardware& hardware, cuda::Stream stream, std::function<void()> run) {
  auto begun = std::make_shared<bool>(false);
  auto ended = std::make_shared<std::atomic<bool>>(false);
  hardware.push(
      stream,
      [=, &hardware] {
        if (!std::exchange(*begun, true)) {
          std::thread([=, &hardware] {
            run();
            auto lock = hardware.lock();
            *ended = true;
            hardware.changed();
          }).detach();
        }
        return ended->load();
      },
      [] {});
}

cuda::Result launch_nccl(Hardware& hardware, cuda::Function function, cuda::Stream stream,
                         void** parameters, void** extra) {
  const std::string& name = function->name;
  if (name.starts_with("oneRankReduce")) {
    OneRank work;
    std::memcpy(&work.output, parameters[0], sizeof work.output);
    std::memcpy(&work.input, parameters[1], sizeof work.input);
    std::memcpy(&work.count, parameters[2], sizeof work.count);
    std::memcpy(&work.scale, parameters[3], sizeof work.scale);
    std::memcpy(&work.scale_is_pointer, parameters[4], sizeof work.scale_is_pointer);
    push_thread(hardware, stream, [=] { run_one_rank(name, work); });
    return 0;
  }
  if (!name.starts_with("ncclDevKernel_")) unknown("kernel " + name);
  const auto* const first =
      static_cast<const std::byte*>(extra[1]);  // behind CU_LAUNCH_PARAM_BUFFER_POINTER
  const size_t bytes = *static_cast<const size_t*>(extra[3]);
  push_thread(hardware, stream, [kept = std::vector(first, first + bytes)] { run_channels(kept); });
  return 0;
}

}  // namespace farandole::check

using namespace farandole;

extern "C" void gpu_double_nccl_code(int version, const char* functions) {
  auto lock = check::Hardware::instance().lock();
  check::code = {version, {}};
  std::istringstream lines(functions);
  for (std::string line; std::getline(lines, line);) check::code.functions.push_back(line);
}

extern "C" void gpu_double_nccl_kernel(const void* host_function, const char* name) {
  auto lock = check::Hardware::instance().lock();
  check::kernels[host_function] = std::make_unique<CUfunc_st>(CUfunc_st{name});
}

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_bytes;
  cuda::Stream stream;
};

extern "C" cuda::Result cuLaunchKernelEx(const LaunchConfig* config, cuda::Function function,
                                         void** parameters, void** extra) {
  return check::call("cuLaunchKernelEx", [&](check::Hardware& hardware) -> int {
    if (const int wrong = hardware.unusable(config->stream)) return wrong;
    return check::launch_nccl(hardware, function, config->stream, parameters, extra);
  });
}
