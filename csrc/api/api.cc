// SPDX-License-Identifier: Apache-2.0
// The functions of farandole.h, except those for GPUs and XLA. Most of them find the runtime and call it.
#include "api/api.h"

#include <pthread.h>

#include <cmath>
#include <set>

#include "base/build_id.h"
#include "base/own_file.h"
#include "runtime/local_endpoint.h"
#include "watch/flight_text.h"

namespace farandole {

Process::Process() {
  pthread_atfork(
      [] {
        // Ensures that no other thread holds the mutex or changes the runtime during fork().
        process().mutex.lock();
        process().arenas.before_fork();
        Fd::before_fork();
      },
      [] {
        Fd::after_fork_in_parent();
        process().arenas.after_fork_in_parent();
        process().mutex.unlock();
      },
      [] {
        process().arenas.after_fork_in_child();  // first: it needs descriptors that Fd closes
        Fd::after_fork_in_child();
        process().mutex.unlock();
      });
}

}  // namespace farandole

using namespace farandole;

FARANDOLE_API const char* farandole_version(void) { return version(); }
FARANDOLE_API const char* farandole_build_id(void) { return build_id(); }

FARANDOLE_API int32_t farandole_is_own_user(uint32_t user) { return is_own_user(user) ? 1 : 0; }
FARANDOLE_API const char* farandole_error(void) { return last_error; }
FARANDOLE_API int32_t farandole_error_code(void) { return static_cast<int32_t>(last_code); }

FARANDOLE_API int32_t farandole_stack_signal(void) {
  return negated([&]() -> int32_t {
    const int64_t wanted = read_config().stack_signal;
    return wanted >= 0 ? static_cast<int32_t>(wanted) : free_signal();
  });
}

namespace {

template <class Count>
Count give(const std::string& whole, char* text, Count capacity) {
  whole.copy(text, rows_in(capacity, whole.size()));
  return static_cast<Count>(whole.size());
}

}  // namespace

FARANDOLE_API int32_t farandole_mpi(char* text, int32_t capacity) {
  return negated([&]() -> int32_t { return give(text_of_mpi(), text, capacity); });
}

FARANDOLE_API int32_t farandole_addresses(char* text, int32_t capacity) {
  return negated([&]() -> int32_t {
    return give(text_of_addresses(read_config().interface), text, capacity);
  });
}

FARANDOLE_API int32_t farandole_sockets(char* text, int32_t capacity) {
  return negated([&]() -> int32_t { return give(text_of_sockets(), text, capacity); });
}

FARANDOLE_API void farandole_stacks(int32_t socket, int32_t signal, int32_t pipe) {
  make_harmless(signal);
  std::lock_guard lock(process().mutex);
  process().stacks = {socket, signal, pipe};
}

FARANDOLE_API int32_t farandole_prepare(char* blob, int32_t capacity) {
  return negated([&]() -> int32_t {
    std::lock_guard lock(process().mutex);
    if (process().runtime) throw Error(ErrorCode::kInvalidArgument, "init() was called already");
    if (process().ended) {
      throw Error(ErrorCode::kInvalidArgument, "the last shutdown() has not ended yet");
    }
    Config config = read_config();
    config.library_folders = process().library_folders;
    process().endpoint = std::make_unique<LocalEndpoint>(std::move(config), process().stacks,
                                                         process().arenas.share());
    ByteString peer_info = process().endpoint->peer_info();
    if (peer_info.size() > static_cast<size_t>(std::max(capacity, 0))) {
      throw Error(ErrorCode::kInvalidArgument,
                  "the peer info needs " + std::to_string(peer_info.size()) + " bytes");
    }
    std::memcpy(blob, peer_info.data(), peer_info.size());
    return static_cast<int32_t>(peer_info.size());
  });
}

namespace {

std::vector<PeerInfo> peer_infos_of(const farandole_world* world) {
  std::vector<PeerInfo> peer_infos;
  for (int32_t r = 0; r < world->size; ++r) {
    peer_infos.push_back(PeerInfo::decode({reinterpret_cast<const std::byte*>(world->blobs[r]),
                                           static_cast<size_t>(world->blob_bytes[r])}));
  }
  return peer_infos;
}

}  // namespace

FARANDOLE_API int32_t farandole_probe(const farandole_world* world) {
  return negated([&]() -> int32_t {
    std::lock_guard lock(process().mutex);
    if (!process().endpoint)
      throw Error(ErrorCode::kInvalidArgument, "call farandole_prepare first");
    std::memcpy(process().endpoint->key.data(), world->key, sizeof(JobKey));
    return process().endpoint->probe(world->rank, {world->node, world->node + world->size},
                                     peer_infos_of(world));
  });
}

FARANDOLE_API int32_t farandole_start(const farandole_world* world) {
  return guarded([&] {
    std::unique_ptr<LocalEndpoint> endpoint;
    {
      std::lock_guard lock(process().mutex);
      endpoint = std::move(process().endpoint);
    }
    if (!endpoint) throw Error(ErrorCode::kInvalidArgument, "call farandole_prepare first");
    std::memcpy(endpoint->key.data(), world->key, sizeof(JobKey));
    std::vector<Rank> node(world->node, world->node + world->size);
    Topology topology = Topology::of(world->rank, std::move(node));
    topology.world = world->number;
    const std::vector<PeerInfo> peer_infos = peer_infos_of(world);
    auto ended = std::make_shared<ExitLatch>();
    std::shared_ptr<Runtime> started(
        new Runtime(std::move(*endpoint), std::move(topology), peer_infos, world->mpi_comm),
        [ended](const Runtime* runtime) {
          delete runtime;
          ended->tell();
        });
    std::lock_guard lock(process().mutex);
    process().runtime = std::move(started);
    process().ended = std::move(ended);
  });
}

FARANDOLE_API int32_t farandole_shutdown(int32_t failed, const char* text, double seconds) {
  return guarded([&]() -> int32_t {
    const Deadline deadline = deadline_in(seconds);
    std::shared_ptr<Runtime> leaving;
    std::shared_ptr<ExitLatch> ended;
    {
      std::lock_guard lock(process().mutex);
      process().endpoint.reset();
      leaving = process().runtime;
      ended = process().ended;
    }
    if (leaving) {
      std::optional<Failure> left = leaving->leave(failed != 0, text ? text : "", deadline);
      if (!left) return FARANDOLE_PENDING;
      std::lock_guard lock(process().mutex);
      ended->failure = *std::move(left);
      if (process().runtime == leaving) process().runtime.reset();
      std::lock_guard prepared_lock(process().prepared_mutex);
      process().prepared.clear();
    }
    if (!ended) return FARANDOLE_OK;
    // The runtime's destructor joins its threads and ends its lanes and backends. After that, no code uses the users'
    // buffers or MPI. A thread in farandole_wait may hold a reference, but returns soon, because every call has failed.
    leaving.reset();
    if (!ended->await(deadline)) return FARANDOLE_PENDING;
    {
      std::lock_guard lock(process().mutex);
      if (process().ended == ended) process().ended.reset();
    }
    const Failure& failure = ended->failure;
    return failure ? set_error(failure.code, failure.text.c_str()) : FARANDOLE_OK;
  });
}

FARANDOLE_API int32_t farandole_initialized(void) {
  if (process().forked) return 0;
  std::lock_guard lock(process().mutex);
  return process().runtime != nullptr;
}

FARANDOLE_API int32_t farandole_broken(void) {
  if (process().forked) return 0;
  std::lock_guard lock(process().mutex);
  return process().runtime && process().runtime->broken();
}

FARANDOLE_API int32_t farandole_where(farandole_topology* out) {
  return translated([&]() -> int32_t {
    if (process().forked && !runtime_if_any()) throw forked_error();
    auto here = runtime();
    const Topology& t = here->topology();
    *out = {t.rank,       t.size,       t.local_rank,          t.local_size(),
            t.cross_rank, t.cross_size, t.homogeneous ? 1 : 0, t.world};
    return FARANDOLE_OK;
  });
}

FARANDOLE_API void farandole_forked(void) { process().forked = true; }

FARANDOLE_API int64_t farandole_prepare_call(const farandole_request* tensors, int32_t count) {
  return negated([&]() -> int64_t {
    auto here = runtime();
    const size_t tensors_given = span_of(tensors, count).size();
    CheckedCall call = here->prepare({tensors, std::max<size_t>(tensors_given, 1)}, tensors_given);
    auto prepared = std::make_shared<const PreparedCall>(std::move(here), std::move(call));
    std::lock_guard lock(process().mutex);
    if (process().runtime != prepared->runtime) {
      throw Error(ErrorCode::kShutdown, "this rank has shut down; call init() first");
    }
    std::lock_guard prepared_lock(process().prepared_mutex);
    const int64_t number = process().next_prepared++;
    process().prepared.emplace(number, std::move(prepared));
    return number;
  });
}

FARANDOLE_API int32_t farandole_submit(const int64_t* calls, const uintptr_t* inputs,
                                       const uintptr_t* outputs, const uint64_t* streams,
                                       int32_t count, int64_t* handles) {
  return guarded([&] {
    const auto known = prepared_calls(span_of(calls, count));
    std::vector<PreparedSubmission> batch;
    batch.reserve(known.size());
    size_t at = 0;
    for (const auto& one : known) {
      const size_t n = one->call.request.parts();
      const std::span<const uint64_t> its(streams ? streams + at : nullptr, streams ? n : 0);
      batch.push_back({&one->call, {inputs + at, n}, {outputs + at, n}, its, {handles + at, n}});
      at += n;
    }
    if (!known.empty()) known.front()->runtime->submit(batch);
    if (std::cmp_less(known.size(), count)) prepared_call(calls[known.size()]);  // throws
  });
}

namespace {

uintptr_t address(const void* at) { return reinterpret_cast<uintptr_t>(at); }

int64_t submit_one(int64_t call, uintptr_t input, uintptr_t output, bool waits) {
  return negated([&]() -> int64_t { return prepared_call(call)->submit(input, output, waits); });
}

}  // namespace

FARANDOLE_API int64_t farandole_submit_one(int64_t call, uintptr_t input, uintptr_t output) {
  return submit_one(call, input, output, false);
}

FARANDOLE_API int64_t farandole_submit_pointers(int64_t call, const void* input, void* output) {
  return submit_one(call, address(input), address(output), false);
}

FARANDOLE_API int64_t farandole_call_one(int64_t call, uintptr_t input, uintptr_t output) {
  return submit_one(call, input, output, true);
}

FARANDOLE_API int64_t farandole_call_pointers(int64_t call, const void* input, void* output) {
  return submit_one(call, address(input), address(output), true);
}

FARANDOLE_API void farandole_forget_prepared(int64_t call) {
  if (process().forked) return;
  std::lock_guard lock(process().prepared_mutex);
  process().prepared.erase(call);
}

FARANDOLE_API int32_t farandole_refuse(const farandole_request* request, int32_t code,
                                       const char* text) {
  return guarded([&] {
    if (code < FARANDOLE_E_INTERNAL || code > FARANDOLE_E_LIBRARY) {
      throw Error(ErrorCode::kInvalidArgument, std::to_string(code) + " is not an error code");
    }
    runtime()->refuse(*request, {static_cast<ErrorCode>(code), text});
  });
}

FARANDOLE_API int32_t farandole_check_unused(uintptr_t address, uint64_t size, int32_t ndim,
                                             const int64_t* shape, const int64_t* strides,
                                             int32_t writes) {
  if (farandole_initialized() == 0) return FARANDOLE_OK;
  return guarded([&] {
    const auto count = static_cast<size_t>(ndim);
    runtime()->calls().check_unused({address, size, {shape, count}, {strides, count}}, writes != 0);
  });
}

FARANDOLE_API int64_t farandole_count_unnamed(int32_t process_set) {
  return negated([&]() -> int64_t {
    return static_cast<int64_t>(runtime()->calls().count_unnamed(process_set));
  });
}

FARANDOLE_API int32_t farandole_poll(int64_t handle) {
  return negated([&]() -> int32_t { return runtime()->driver().done(handle); });
}

namespace {

int32_t wait_in(Runtime& here, std::span<const Handle> handles, double seconds) {
  Failure failure;
  const bool endless = seconds < 0 && !xla_may_call;
  switch (here.driver().wait(handles, deadline_in(std::abs(seconds)), failure, endless)) {
    case WaitEnd::kDone: return FARANDOLE_OK;
    case WaitEnd::kTimeIsUp: return FARANDOLE_PENDING;
    case WaitEnd::kFailed: break;
  }
  return set_error(failure.code, failure.text.c_str());
}

}  // namespace

FARANDOLE_API int32_t farandole_wait(const int64_t* handles, int32_t count, double seconds) {
  return guarded([&] { return wait_in(*runtime(), span_of(handles, count), seconds); });
}

FARANDOLE_API int32_t farandole_finish(int64_t handle, double seconds) {
  return guarded([&] {
    const auto here = runtime();
    const int32_t code = wait_in(*here, {&handle, 1}, seconds);
    if (code == FARANDOLE_OK) here->handles().release(handle);
    return code;
  });
}

FARANDOLE_API int32_t farandole_explain(int64_t handle, double seconds, char* text,
                                        int32_t capacity) {
  return negated([&]() -> int32_t {
    const std::string found = runtime()->driver().explain(handle, deadline_in(seconds));
    const size_t room = static_cast<size_t>(std::max(capacity, 1)) - 1;
    const size_t length = found.copy(text, room);
    if (capacity > 0) text[length] = '\0';
    return static_cast<int32_t>(found.size());
  });
}

FARANDOLE_API int32_t farandole_result_of(int64_t handle, farandole_result* out) {
  // Each thread has its own copy, because another thread may release the handle or destroy the runtime at any time.
  thread_local std::vector<int64_t> shape, received;
  return guarded([&] {
    runtime()->handles().look(handle, [&](const Outcome& outcome) {
      shape.assign(outcome.shape.begin(), outcome.shape.end());
      received = outcome.received;
      *out = {outcome.output,
              outcome.absent ? 1 : 0,
              static_cast<int32_t>(shape.size()),
              shape.data(),
              static_cast<int32_t>(received.size()),
              received.data(),
              outcome.value};
    });
  });
}

FARANDOLE_API int32_t farandole_sizes_of(int64_t handle, int64_t* sizes, int32_t capacity) {
  return negated([&]() -> int32_t {
    std::vector<int64_t> found;
    runtime()->handles().look(handle, [&](const Outcome& outcome) {
      found.assign(outcome.shape.begin(), outcome.shape.end());
      found.insert(found.end(), outcome.received.begin(), outcome.received.end());
    });
    if (const size_t n = rows_in(capacity, found.size())) std::copy_n(found.begin(), n, sizes);
    return static_cast<int32_t>(found.size());
  });
}

FARANDOLE_API void farandole_release(int64_t handle) {
  guarded([&] { runtime()->handles().release(handle); });
}

FARANDOLE_API void farandole_release_all(const int64_t* handles, int32_t count) {
  guarded([&] { runtime()->handles().release_all(span_of(handles, count)); });
}

FARANDOLE_API void* farandole_take(int64_t handle) {
  std::byte* memory = nullptr;
  last_code = ErrorCode::kOk;
  guarded([&] {
    OwnedMemory taken = runtime()->handles().take(handle);
    if (taken.get_deleter().device) {
      std::lock_guard lock(process().on_gpu_mutex);
      process().on_gpu[taken.get()] = taken.get_deleter().device;
    }
    memory = taken.release();
  });
  return memory;
}

FARANDOLE_API void farandole_free(void* memory) {
  FreeMemory{nullptr}(static_cast<std::byte*>(memory));
}

FARANDOLE_API int32_t farandole_set_ranks(int32_t process_set, int32_t* ranks, int32_t capacity) {
  return negated([&]() -> int32_t {
    std::vector<Rank> found = runtime()->ranks_of(process_set);
    if (const size_t rows = rows_in(capacity, found.size())) {
      std::copy_n(found.begin(), rows, ranks);
    }
    return static_cast<int32_t>(found.size());
  });
}

namespace {

// Keeps a copy of each text as long as this thread lives. Memory that the thread's next call reuses would not do,
// because a signal handler may make that call.
const char* lasting(std::string text) {
  thread_local std::set<std::string> texts;
  return texts.insert(std::move(text)).first->c_str();
}

}  // namespace

FARANDOLE_API int32_t farandole_variables(farandole_variable* rows, int32_t capacity) {
  return negated([&]() -> int32_t {
    const auto here = runtime_if_any();
    Config config = here ? here->config() : read_config();
    auto table = variables();
    for (size_t i = 0; i < rows_in(capacity, table.size()); ++i) {
      rows[i] = {table[i].name,
                 table[i].alias,
                 table[i].fallback,
                 table[i].meaning,
                 lasting(table[i].get(config)),
                 table[i].job_wide ? 1 : 0,
                 text_of(config.sources[i])};
    }
    return static_cast<int32_t>(table.size());
  });
}

FARANDOLE_API int32_t farandole_counters(farandole_counter* rows, int32_t capacity) {
  return negated([&]() -> int32_t {
    const auto here = runtime_if_any();
    const farandole_counter counters[] = {
        {"rescued_wakeups", static_cast<int64_t>(rescued_wakeups())},
        {"mapped_bytes", here ? static_cast<int64_t>(here->mapped_bytes()) : 0},
        {"sleeps", here ? static_cast<int64_t>(here->driver().sleeps()) : 0},
    };
    if (const size_t n = rows_in(capacity, std::size(counters))) std::copy_n(counters, n, rows);
    return static_cast<int32_t>(std::size(counters));
  });
}

// ---- Zero copy

FARANDOLE_API int32_t farandole_allocate(uint64_t bytes, void** memory) {
  return guarded([&] { *memory = process().arenas.allocate(bytes); });
}

FARANDOLE_API void farandole_deallocate(void* memory) {
  if (process().forked) return;  // the pages belong to the parent
  guarded([&] { process().arenas.release(static_cast<std::byte*>(memory)); });
}

// ---- Watching

namespace {

FlightView view_of(int32_t fd) {
  if (fd >= 0) return FlightView(fd);
  return FlightView(runtime()->watch().flight_fd());
}

}  // namespace

FARANDOLE_API int32_t farandole_flight_ranks(int32_t fd) {
  return negated([&]() -> int32_t { return view_of(fd).local_ranks(); });
}

FARANDOLE_API int64_t farandole_flight(int32_t fd, int32_t local, int32_t events, char* text,
                                       int64_t capacity) {
  return negated([&]() -> int64_t {
    const std::string whole = view_of(fd).text(local, static_cast<size_t>(std::max(events, 0)));
    return give(whole, text, capacity);
  });
}

FARANDOLE_API int32_t farandole_story(const char* text) {
  return guarded([&] { runtime()->watch().recorder().tell_story(text); });
}

FARANDOLE_API int32_t farandole_finding(const char* text) {
  return guarded([&] { runtime()->watch().recorder().tell_finding(text); });
}

FARANDOLE_API int32_t farandole_dump(int32_t fd, const char* folder, const char* reason) {
  return guarded([&] { view_of(fd).dump(folder, reason); });
}

FARANDOLE_API int32_t farandole_end_after(double seconds, const char* text, int32_t count,
                                          const int32_t* processes, const char* const* texts) {
  return guarded([&] {
    std::unique_ptr<Watchdog> limit;
    if (seconds >= 0) {
      std::vector<Watchdog::Awaited> awaited;
      for (int32_t i = 0; i < count; ++i) {
        const uint64_t start = process_start_time(processes[i]).value_or(0);
        std::optional<PidFd> other = PidFd::open(processes[i], start);
        if (other) awaited.push_back({std::move(*other), texts[i]});
      }
      limit = std::make_unique<Watchdog>(deadline_in(seconds), text, std::move(awaited));
    }
    std::lock_guard lock(process().mutex);
    process().init_limit.swap(limit);
  });
}

FARANDOLE_API int32_t farandole_start_timeline(const char* path, int32_t mark_cycles) {
  return guarded([&] { runtime()->watch().start_timeline(path, mark_cycles != 0); });
}

FARANDOLE_API int32_t farandole_stop_timeline(void) {
  return guarded([&] { runtime()->watch().recorder().timeline().stop(); });
}
