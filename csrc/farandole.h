/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of farandole: the one door into the core. Declarations, enums and `#define N literal`
 * only, so that cffi reads this very file. Every function may be called from any thread unless its
 * comment says otherwise. Functions that return int32_t return FARANDOLE_OK or an error code; the
 * text is then in farandole_error(), which belongs to the calling thread. */

#define FARANDOLE_ABI_VERSION 2

/* Error codes; each is one Python class. */
#define FARANDOLE_OK 0
#define FARANDOLE_E_INTERNAL 1
#define FARANDOLE_E_ARGUMENT 2
#define FARANDOLE_E_TYPE 3
#define FARANDOLE_E_MISMATCH 4
#define FARANDOLE_E_PEER 5
#define FARANDOLE_E_STALL 6
#define FARANDOLE_E_SHUTDOWN 7
#define FARANDOLE_E_LIBRARY 8

/* What farandole_wait may return beside the codes above. */
#define FARANDOLE_PENDING 100 /* time is up, or a signal came: run handlers, then wait again */

enum farandole_op {
  FARANDOLE_ALLREDUCE = 0,
  FARANDOLE_BROADCAST = 1,
  FARANDOLE_ALLGATHER = 2,
  FARANDOLE_REDUCESCATTER = 3,
  FARANDOLE_ALLTOALL = 4,
  FARANDOLE_BARRIER = 5,
  FARANDOLE_JOIN = 6,
  FARANDOLE_ADD_SET = 7,    /* shape = the ranks, ascending */
  FARANDOLE_REMOVE_SET = 8, /* root = the set's id */
  FARANDOLE_SCATTER = 9     /* other ranks' inputs give dtype and trailing shape only */
};

enum farandole_reduce_op {
  FARANDOLE_AVERAGE = 0,
  FARANDOLE_SUM = 1,
  FARANDOLE_ADASUM = 2,
  FARANDOLE_MIN = 3,
  FARANDOLE_MAX = 4,
  FARANDOLE_PRODUCT = 5
};

enum farandole_dtype {
  FARANDOLE_UINT8 = 0,
  FARANDOLE_INT8 = 1,
  FARANDOLE_UINT16 = 2,
  FARANDOLE_INT16 = 3,
  FARANDOLE_UINT32 = 4,
  FARANDOLE_INT32 = 5,
  FARANDOLE_UINT64 = 6,
  FARANDOLE_INT64 = 7,
  FARANDOLE_FLOAT16 = 8,
  FARANDOLE_BFLOAT16 = 9,
  FARANDOLE_FLOAT32 = 10,
  FARANDOLE_FLOAT64 = 11,
  FARANDOLE_BOOL = 12,
  FARANDOLE_COMPLEX64 = 13,
  FARANDOLE_COMPLEX128 = 14,
  FARANDOLE_FLOAT8_E4M3FN = 15, /* reductions of float8: on the CPU only */
  FARANDOLE_FLOAT8_E5M2 = 16
};

/* One tensor of one call. Strings and arrays are copied; buffers are not: they must live, and must
 * not be touched, until the handle is done. */
typedef struct farandole_request {
  int32_t op;
  int32_t reduce_op;
  int32_t dtype;
  int32_t device; /* -1: CPU memory; else a CUDA device */
  int32_t root;   /* world rank; broadcast and scatter only */
  int32_t process_set;
  double prescale; /* result = postscale * reduce(prescale * input) */
  double postscale;
  int32_t ndim;
  const int64_t* shape;
  const void* input; /* C-contiguous; NULL: "I contribute the identity" */
  void*
      output; /* same shape as the input for allreduce and broadcast; may be the input (not alltoall's, nor scatter's);
                            an allgather's input may lie where its rows belong. Other overlaps are refused. NULL:
                            the result is dropped, or, where only negotiation knows its size (allgather,
                            alltoall, reducescatter, scatter), allocated by the core: see farandole_result */
  int32_t n_splits; /* alltoall, scatter's root: rows for each member; 0: equal parts */
  const int64_t* splits;
  const char* name; /* NULL: matched by the order of unnamed calls */
  const char*
      group; /* members of one group are reduced together, all or none; NULL: alone. The first of a group has
                        its very name: there ranks meet whatever they bring. Unnamed tensors of one submission are a
                        group that needs no name */
  int32_t group_size;
  uint64_t stream; /* CUDA stream on which the input was produced; 0 on CPU */
  uint32_t
      window; /* allreduce on a GPU: reduce at byte `place` of this window (farandole_open_window), */
  uint64_t
      place; /* which all ranks name alike; copies nothing where the buffers lie there. 0: nowhere */
} farandole_request;

/* What a finished handle holds. shape and received belong to the calling thread, until its next call of
 * farandole_result_of: they outlive the handle and the job. */
typedef struct farandole_result {
  void*
      output; /* the request's output, or memory that belongs to the handle until farandole_take */
  int32_t absent; /* 1: nobody had a buffer, nothing was written */
  int32_t ndim;
  const int64_t* shape; /* of the output */
  int32_t n_received;
  const int64_t* received; /* alltoall: rows received from each member */
  int64_t value;           /* join: the last rank; add_set: the new set's id */
} farandole_result;

/* Where this rank stands. node[r] names the shared-memory host of world rank r by its lowest rank.
 * blobs: what each rank's farandole_prepare wrote, in rank order. */
typedef struct farandole_world {
  int32_t rank;
  int32_t size;
  const int32_t* node;
  const char* const* blobs;
  const int32_t* blob_bytes;
  const void*
      mpi_comm; /* the address of an MPI_Comm of these ranks in this order, which must live until
                           farandole_shutdown; NULL: all ranks share one host */
} farandole_world;

typedef struct farandole_topology {
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t cross_rank, cross_size;
  int32_t homogeneous; /* every host holds the same number of ranks */
} farandole_topology;

typedef struct farandole_variable {
  const char* name;     /* FARANDOLE_... */
  const char* alias;    /* HOROVOD_... of the same meaning, or "" */
  const char* fallback; /* default, as text */
  const char* meaning;
  const char* value;  /* in force now, as text */
  int32_t job_wide;   /* 1: rank 0's value holds for all ranks */
  const char* source; /* of the value: "default", "tuning file", "environment" or "rank 0" */
} farandole_variable;

typedef struct farandole_counter {
  const char* name;
  int64_t value;
} farandole_counter;

/* ---- starting and leaving: one allgather of opaque bytes is all that the caller must bring */
const char* farandole_version(void);
const char* farandole_build_id(void);
/* For stall reports, once per process and before farandole_prepare: which signal shall make Python's main thread write
 * its stacks (0: none), and the reading end, which never blocks, of the pipe that it writes to. Python's handler is
 * installed after farandole_stacks, which puts a harmless one beneath it. */
int32_t farandole_stack_signal(void);
void farandole_stacks(int32_t signal, int32_t pipe);
/* Folders, separated by ':', in which to look for libnccl and libnvrtc; before farandole_prepare. */
void farandole_library_folders(const char* folders);
/* Ends this process with `text` on stderr after so many seconds, unless it is called again before; negative: never.
 * For what blocks with no limit of its own, as MPI_Init does. */
int32_t farandole_end_after(double seconds, const char* text);
/* Step 1: reads the settings, opens this rank's door. Returns the blob's length, or -code. */
int32_t farandole_prepare(char* blob, int32_t capacity);
/* Step 2, after an allgather of the blobs: the rank whose memory this one can share, or its own, or -code. node: as
 * MPI has it; an allgather of the answers is the node of step 3. */
int32_t farandole_knock(const farandole_world* world);
/* Step 3: meets the others. Fails in bounded time. After a failure,
 * or when another rank failed, call farandole_shutdown. */
int32_t farandole_start(const farandole_world* world);
/* Leaves. failed: 0 if this rank finished normally. text: why, for the peers ("ValueError: ..."). It is over when
 * all have left, at the latest after FARANDOLE_SHUTDOWN_TIMEOUT (FARANDOLE_E_STALL names those that have not), or, if
 * failed, after FARANDOLE_LEAVE_TIMEOUT; FARANDOLE_PENDING after `seconds`: call again. Once it has returned something
 * else, no thread of this process reads or writes a buffer of any request, or calls MPI. */
int32_t farandole_shutdown(int32_t failed, const char* text, double seconds);
int32_t farandole_initialized(void);
/* 1: the job has failed, and ranks that are dead or out of reach will never leave. */
int32_t farandole_broken(void);
/* In a forked child: where its parent stood. */
int32_t farandole_where(farandole_topology* topology);
/* For the child of a fork: every later call but farandole_where fails with a reason. */
void farandole_forked(void);

/* ---- work */
/* Submits `count` tensors at once; handles[i] is set for each. On an error nothing stays submitted, and the
 * peers that wait for the same names fail too. */
int32_t farandole_submit(const farandole_request* requests, int32_t count, int64_t* handles);
/* For repeated work: farandole_tensor keeps a request (its buffers are ignored) and returns its number, or -code;
 * farandole_submit_tensor submits it with the buffers at these addresses (0: none) and returns a handle, or -code. */
int64_t farandole_tensor(const farandole_request* request);
int64_t farandole_submit_tensor(int64_t tensor, uintptr_t input, uintptr_t output);
/* The same for callers that hold pointers: in Python a pointer costs less than the number it stands for. */
int64_t farandole_submit_buffer(int64_t tensor, const void* input, void* output);
/* Several of them in place: handles[i] is set for each, up to the first that fails, whose code is returned. */
int32_t farandole_submit_buffers(const int64_t* tensors, const uintptr_t* buffers, int32_t count,
                                 int64_t* handles);
void farandole_forget_tensor(int64_t tensor);
/* Tells the peers of `name` that this rank cannot take part: they fail with this code and text instead of waiting.
 * Under the name of a group, and unnamed, it is said of all its tensors, however many the peers bring.
 * A join is refused by the next farandole_submit of one: it ends with this when all have joined. */
int32_t farandole_refuse(const farandole_request* request, int32_t code, const char* text);
/* How many unnamed calls (a group is one) this rank has made in the set: equal on all members, or -code. */
int64_t farandole_count_unnamed(int32_t process_set);

/* As farandole_submit_tensor, for a tensor on a GPU whose buffers are produced on this CUDA stream. */
int64_t farandole_submit_tensor_on(int64_t tensor, uintptr_t input, uintptr_t output,
                                   uint64_t stream);

/* 1: done, failed, or launched on a GPU (farandole_wait returns at once); 0: under way, -code: no such handle. */
int32_t farandole_poll(int64_t handle);
/* Blocks until all are done or one failed: FARANDOLE_OK, its code, or FARANDOLE_PENDING after `seconds` or a signal. */
int32_t farandole_wait(const int64_t* handles, int32_t count, double seconds);
/* As farandole_wait for one handle, which goes back, as by farandole_release, if the answer is FARANDOLE_OK. */
int32_t farandole_finish(int64_t handle, double seconds);
/* For handles that farandole_wait has returned: what comes later in this CUDA stream sees the results of
 * those on a GPU. Blocks nobody. */
int32_t farandole_join_stream(const int64_t* handles, int32_t count, uint64_t stream);
/* 1: nobody uses the handle's buffers any more (on a GPU that is later than farandole_wait), 0: they are in
 * use, -code: no such handle. */
int32_t farandole_settled(int64_t handle);
int32_t farandole_result_of(int64_t handle, farandole_result* result);
/* Gives the handle back. A handle under way is released when it is done; its buffers must live until then. */
void farandole_release(int64_t handle);
void farandole_release_all(const int64_t* handles, int32_t count);
/* The memory that a result owns passes to the caller, who gives it back by farandole_free (farandole_free_on).
 * NULL: farandole_error() says why there is none: the call failed, its result was taken before or lies in the
 * caller's own memory, or another thread has shut down meanwhile. */
void* farandole_take(int64_t handle);
void farandole_free(void* memory);
/* The same for memory on a GPU, once work that is now in this CUDA stream is done. */
void farandole_free_on(void* memory, uint64_t stream);

/* Memory of our own on a GPU, for outputs: usable behind what is now in this CUDA stream. Goes back by
 * farandole_free_on. */
int32_t farandole_allocate_on(int32_t device, uint64_t bytes, uint64_t stream, void** memory);
/* The CUDA device on which memory lies; of address 0 the one that this rank uses; or -code. */
int32_t farandole_device_of(uintptr_t address);
/* What comes later in `stream` waits for what is now in `before`. Blocks nobody. */
int32_t farandole_order_streams(int32_t device, uint64_t before, uint64_t stream);

/* For Adasum on a GPU; both block until it is done. dots[i * count + j]: the dot product, in float64, of rows i and j
 * of a (count, elements) matrix of floats that is complete at this point of `stream`. */
int32_t farandole_gpu_dots(int32_t device, int32_t dtype, uintptr_t rows, int32_t count,
                           uint64_t elements, uint64_t stream, double* dots);
/* target = source * factor: floats of one dtype, or 16-bit ones and float32. */
int32_t farandole_gpu_scale(int32_t device, int32_t to, uintptr_t target, int32_t from,
                            uintptr_t source, uint64_t elements, double factor, uint64_t stream);

/* Whom the call behind a handle under way waits for, and why, as text; asks the coordinator, for `seconds` at most.
 * Returns the text's length before it is cut to `capacity`, or -code. */
int32_t farandole_explain(int64_t handle, double seconds, char* text, int32_t capacity);

/* ---- zero copy */
/* Memory, zeroed and aligned to pages, that the other ranks of this host map: collectives between such buffers
 * copy nothing. Before, within and after a job. A forked child sees the parent's content until it writes
 * there; its writes stay its own. */
int32_t farandole_allocate(uint64_t bytes, void** memory);
/* No call on the memory may be under way. */
void farandole_deallocate(void* memory);

/* The same on a GPU: memory that NCCL reduces in place (ncclMemAlloc), not zeroed. The members of a process set
 * open its windows in the same order, of the same sizes, within one job. *window: its number for the set's
 * requests. Where NCCL registers no memory, it is ordinary memory and nothing is saved: said once in the log. */
int32_t farandole_open_window(int32_t device, int32_t process_set, uint64_t bytes, void** memory,
                              uint32_t* window);
/* No call on the memory may be under way; it may outlive the job. Blocks until the GPU has done what is now in its
 * streams: they may use the memory to their end. */
void farandole_close_window(void* memory);

/* Ranks of a process set: returns their number, or -code; fills at most `capacity`. */
int32_t farandole_set_ranks(int32_t process_set, int32_t* ranks, int32_t capacity);

/* ---- looking in */
/* Why this thread's last call failed that did; until its next one that does. */
const char* farandole_error(void);
int32_t farandole_error_code(void);
/* Both return how many rows there are. Values belong to the calling thread, until its next call of
 * farandole_variables. */
int32_t farandole_variables(farandole_variable* rows, int32_t capacity);
int32_t farandole_counters(farandole_counter* rows, int32_t capacity);
/* The flight recorder of local rank `local` as JSON, its last `events` events; returns the length, or -code; fills
 * at most `capacity`. fd: the recorders' memory of another job of this user; -1: the own job's. */
int64_t farandole_flight(int32_t fd, int32_t local, int32_t events, char* text, int64_t capacity);
/* Ranks that share those recorders, or -code. */
int32_t farandole_flight_ranks(int32_t fd);
/* A trace of this rank for Chrome or Perfetto: PATH on rank 0, NAME.rankN.SUFFIX beside it on the others. */
int32_t farandole_start_timeline(const char* path, int32_t mark_cycles);
int32_t farandole_stop_timeline(void);
/* Writes FOLDER/flight-rank-N.json for each of them. */
int32_t farandole_dump(int32_t fd, const char* folder, const char* reason);
