/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of farandole, and the only way to call the core. This file holds only declarations, enums and `#define N
 * literal`, because cffi reads it unchanged. Unless a function's comment says otherwise, the function may be called
 * from any thread, and an int32_t result is FARANDOLE_OK or an error code. After an error, farandole_error() returns
 * the error's text to the thread that made the call. "-code" stands for a negated error code. */

#define FARANDOLE_ABI_VERSION 19

/* Error codes. Each corresponds to a Python exception class. */
#define FARANDOLE_OK 0
#define FARANDOLE_E_INTERNAL 1
#define FARANDOLE_E_ARGUMENT 2
#define FARANDOLE_E_TYPE 3
#define FARANDOLE_E_MISMATCH 4
#define FARANDOLE_E_PEER 5
#define FARANDOLE_E_STALL 6
#define FARANDOLE_E_SHUTDOWN 7
#define FARANDOLE_E_LIBRARY 8

#define FARANDOLE_KEY_BYTES 16 /* length of farandole_world.key */
/* Returned by functions that wait, after a timeout or a signal. This is not an error: run signal handlers, then call
 * the function again. */
#define FARANDOLE_PENDING 100

enum farandole_op {
  FARANDOLE_ALLREDUCE = 0,
  FARANDOLE_BROADCAST = 1,
  FARANDOLE_ALLGATHER = 2,
  FARANDOLE_REDUCESCATTER = 3,
  FARANDOLE_ALLTOALL = 4,
  FARANDOLE_BARRIER = 5,
  FARANDOLE_JOIN = 6,
  FARANDOLE_ADD_SET = 7,    /* shape: the ranks, ascending */
  FARANDOLE_REMOVE_SET = 8, /* root: the set's id; with by_members, shape: the set's ranks */
  FARANDOLE_SCATTER = 9,    /* only the root sends; other inputs give dtype and trailing shape */
  /* A send and a receive match if each names the other's rank as `root` and both have the same set and tag. Sends
   * are matched in the order in which they were made, and so are receives. A send and its matching receive must
   * agree on the dtype and the number of elements. */
  FARANDOLE_SEND = 10,
  FARANDOLE_RECEIVE = 11,
  FARANDOLE_REDUCE = 12 /* only the root's output is written */
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
  FARANDOLE_FLOAT8_E4M3FN = 15, /* float8 is reduced on the CPU only */
  FARANDOLE_FLOAT8_E5M2 = 16
};

/* One tensor of one call. The core copies the strings and arrays, but not the input and the output. From
 * farandole_submit until farandole_settled returns 1, the input and the output must stay valid, and nobody else may
 * access them. */
typedef struct farandole_request {
  int32_t op;
  int32_t reduce_op;
  int32_t dtype;
  int32_t device; /* -1 for CPU memory, otherwise a CUDA device */
  /* World rank of the root. In a send, the receiver's rank. In a receive, the sender's rank, or -1 for any sender
   * that uses this tag. */
  int32_t root;
  int32_t process_set;
  double prescale; /* result = postscale * reduce(prescale * input) */
  double postscale;
  int32_t ndim;
  const int64_t* shape;
  const void* input; /* C-contiguous; NULL if this rank receives or contributes the identity */
  /* Memory for the result. In allreduce, broadcast and reduce, the output has the input's shape. In allgather, the
   * output has as many rows as the input for each member, so all inputs must have the same shape. In reducescatter,
   * the output has this rank's rows. Except in alltoall and scatter, the output may be the same memory as the input;
   * the result of a reducescatter then lies at the start of that memory. The input of an allgather may lie at the
   * place in the output where its rows belong. Any other overlap is refused. If output is NULL, the core allocates
   * the result of an allgather, alltoall, reducescatter or scatter (see farandole_result), and other calls discard
   * their result. */
  void* output;
  int32_t n_splits;      /* length of splits; 0 for equal parts */
  const int64_t* splits; /* for alltoall and scatter's root: number of rows for each member */
  /* NULL for an unnamed call; unnamed calls match by their order. The name of a send or a receive is only shown to
   * users. */
  const char* name;
  int32_t by_members; /* for add_set and remove_set: 1 if only the ranks in the shape take part */
  int64_t tag;        /* for sends and receives; not negative */
  /* Source line of the call in the user's program, such as "train.py:12", or NULL if it is unknown. Ranks compare
   * the lines of unnamed calls: see FARANDOLE_CALL_SITES. */
  const char* site;
  int32_t any_site; /* 1 if ranks may make this call on different lines */
} farandole_request;

/* Result of a finished call. shape and received stay valid until the calling thread next calls farandole_result_of. */
typedef struct farandole_result {
  void* output;   /* the request's output, or memory that the handle owns until farandole_take */
  int32_t absent; /* 1 if no rank had an input, so that nothing was written */
  int32_t ndim;
  const int64_t* shape; /* the shape of the output */
  int32_t n_received;
  /* In allgather and alltoall, the number of rows received from each member of the set. A member that has joined
   * sends 0. */
  const int64_t* received;
  int64_t value; /* join: the last rank; add_set: the new set's id; receive: the sender */
} farandole_result;

/* The world of this rank. node[r] is the lowest rank that shares memory with world rank r. blobs holds the output of
 * each rank's farandole_prepare, in rank order. */
typedef struct farandole_world {
  int32_t rank;
  int32_t size;
  const int32_t* node;
  const char* const* blobs;
  const int32_t* blob_bytes;
  /* Address of an MPI_Comm of these ranks in this order, which must stay valid until farandole_shutdown. NULL if
   * hosts do not communicate through MPI. */
  const void* mpi_comm;
  int32_t number; /* number of this world; each restart of the job increments it */
  /* FARANDOLE_KEY_BYTES bytes, derived from a secret and from all blobs. All ranks have the same key. When a socket
   * connects, both ends prove that they know the key. */
  const char* key;
} farandole_world;

typedef struct farandole_topology {
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t cross_rank, cross_size;
  int32_t homogeneous; /* 1 if every host has the same number of ranks */
  int32_t world;       /* farandole_world.number */
} farandole_topology;

typedef struct farandole_variable {
  const char* name;     /* FARANDOLE_... */
  const char* alias;    /* HOROVOD_... with the same meaning, or "" */
  const char* fallback; /* default, as text */
  const char* meaning;
  const char* value;  /* current value, as text */
  int32_t job_wide;   /* 1 if rank 0's value applies to all ranks */
  const char* source; /* origin of the value: "default", "tuning file", "environment" or "rank 0" */
} farandole_variable;

typedef struct farandole_counter {
  const char* name;
  int64_t value;
} farandole_counter;

/* ---- starting and leaving. The core needs only one service from its caller: an allgather of opaque bytes. */
const char* farandole_version(void);
const char* farandole_build_id(void);
/* Returns 1 if this process runs as this user. Always returns 0 for the kernel's overflow user (nobody) in a user
 * namespace that does not map every user, because all unmapped users appear as nobody there. */
int32_t farandole_is_own_user(uint32_t user);
/* Returns the signal for stack reports: FARANDOLE_STACK_SIGNAL if it is set, else a free signal, else 0. Returns
 * -code on failure. */
int32_t farandole_stack_signal(void);
/* Prepares stack reports. Call this once per process, before farandole_prepare. `socket` is the end of a pair of Unix
 * sockets (SOCK_SEQPACKET). A thread of Python answers each byte that arrives at the other end with one message: '1'
 * if only the main thread runs Python code that may make calls, else '0', then the stacks of all threads, the main
 * thread's first. `signal` is a signal (0 for none) on which the main thread writes its own stack to a pipe, and
 * `pipe` is the non-blocking read end of that pipe. The core uses the signal if the thread does not answer. Install
 * Python's handler afterwards. */
void farandole_stacks(int32_t socket, int32_t signal, int32_t pipe);
/* Each of these functions writes a text about this process, one item per line and at most `capacity` bytes, and
 * returns the full length, or -code. They may be called before init(). farandole_mpi writes the file, binary
 * interface and version of the loaded MPI, or an empty text. farandole_addresses writes a line such as `eth0
 * 10.0.0.1` for each address that other hosts may be able to reach. farandole_sockets writes the prefix of this
 * user's socket paths, then a text that is the same in all processes that can reach each other's Unix sockets. */
int32_t farandole_mpi(char* text, int32_t capacity);
int32_t farandole_addresses(char* text, int32_t capacity);
int32_t farandole_sockets(char* text, int32_t capacity);
/* Sets the folders, separated by ':', in which farandole searches for libnccl and libnvrtc. Call this before
 * farandole_prepare. */
void farandole_library_folders(const char* folders);
/* Starts a watchdog for calls without a time limit, such as MPI_Init. After `seconds`, the watchdog prints `text` on
 * stderr and ends this process. If the process with the id processes[i] ends earlier, the watchdog prints texts[i]
 * and ends this process at once. Replaces the previous watchdog; if `seconds` is negative, only stops it. Returns
 * FARANDOLE_E_PEER if one of the processes has already ended. */
int32_t farandole_end_after(double seconds, const char* text, int32_t count,
                            const int32_t* processes, const char* const* texts);
/* Step 1: reads the settings and opens this rank's sockets. Returns the length of the blob, or -code. */
int32_t farandole_prepare(char* blob, int32_t capacity);
/* Step 2: call this after an allgather of the blobs, with world->node as MPI reports it. Returns the lowest rank on
 * this rank's host, which may be this rank, or -code. An allgather of these results gives world->node for step 3. */
int32_t farandole_probe(const farandole_world* world);
/* Step 3: connects to the other ranks, in bounded time. If this fails on any rank, call farandole_shutdown. */
int32_t farandole_start(const farandole_world* world);
/* Leaves the job. `failed` is 0 if this rank finished normally; otherwise `text` tells the peers why it failed
 * ("ValueError: ..."). Returns when all ranks have left. If they have not left after FARANDOLE_SHUTDOWN_TIMEOUT (or
 * after one second, if this rank failed), returns FARANDOLE_E_STALL with an error text that names the remaining
 * ranks. Returns FARANDOLE_PENDING after `seconds`; call it again. Once any other result has been returned, the core
 * neither accesses a request's buffer nor calls MPI. */
int32_t farandole_shutdown(int32_t failed, const char* text, double seconds);
int32_t farandole_initialized(void);
/* Returns 1 if the job has failed because ranks are dead or unreachable. Those ranks will never leave. */
int32_t farandole_broken(void);
/* Writes the topology of this process's world. In a forked child, writes the parent's topology. */
int32_t farandole_where(farandole_topology* topology);
/* Call this in a forked child. Afterwards all functions except farandole_where fail with an explanation. */
void farandole_forked(void);

/* ---- work */
/* Prepares a call: checks it and stores it without its buffers. Returns the call's number, or -code. After a
 * failure, call farandole_refuse to report the failure to the peers. Several tensors form a group: one call whose
 * tensors are reduced together or not at all. They must belong to one process set and be all on the CPU or all on
 * the GPU, and the group takes its name, set and site from the first tensor. If `count` is 0, tensors[0] must be a
 * barrier, and its name becomes the name of an empty group. */
int64_t farandole_prepare_call(const farandole_request* tensors, int32_t count);
/* Submits prepared calls in order. Stops at the first call that fails and returns its error code. The failed call
 * also fails on its peers, and the calls before it have handles. inputs, outputs, streams and handles have one
 * element for each tensor of each call, in order; an empty group counts as one tensor. Inputs and outputs are
 * addresses, or 0 for none. streams holds the CUDA streams that produce the inputs, or is NULL if all tensors are on
 * the CPU. */
int32_t farandole_submit(const int64_t* calls, const uintptr_t* inputs, const uintptr_t* outputs,
                         const uint64_t* streams, int32_t count, int64_t* handles);
/* Submits a call with a single CPU tensor. Returns a handle, or -code. This saves Python the time to build arrays.
 * The second form is for cffi, which passes a pointer faster than an address. */
int64_t farandole_submit_one(int64_t call, uintptr_t input, uintptr_t output);
int64_t farandole_submit_pointers(int64_t call, const void* input, void* output);
/* Like farandole_submit_one, for a caller that would otherwise wait for the result at once. The ranks of one host
 * complete a small call among themselves. Returns 0 if the call is done; there is then no handle. Returns a handle
 * if the call is not done within 20 ms, has failed, or lacks `input` or `output`, or if a signal has arrived. */
int64_t farandole_call_one(int64_t call, uintptr_t input, uintptr_t output);
int64_t farandole_call_pointers(int64_t call, const void* input, void* output);
void farandole_forget_prepared(int64_t call);
/* Reports that this rank cannot take part in the request's call. The call then fails on the peers with this code and
 * text. A refused join is not reported until this rank makes its next join. When all members have joined, all of
 * their joins fail. */
int32_t farandole_refuse(const farandole_request* request, int32_t code, const char* text);
/* For callers that pass a copy of a user's array, so that the core never sees the address of the array itself.
 * Returns FARANDOLE_E_ARGUMENT if an unfinished call writes to these elements or, if `writes` is set, reads them.
 * `size` is the size of an element, in bytes; strides are also in bytes. Always returns FARANDOLE_OK outside a job. */
int32_t farandole_check_unused(uintptr_t address, uint64_t size, int32_t ndim, const int64_t* shape,
                               const int64_t* strides, int32_t writes);
/* Returns the number of unnamed calls that this rank has made in the set. The number is the same on all members. */
int64_t farandole_count_unnamed(int32_t process_set);

/* Returns 1 if the call is done, has failed, or has been launched on a GPU, so that farandole_wait would return at
 * once. Returns 0 if the call is in flight, or -code if the handle is unknown. */
int32_t farandole_poll(int64_t handle);
/* Blocks until all handles are done or one has failed. Returns FARANDOLE_OK, the code of the failure, or
 * FARANDOLE_PENDING after `seconds` or a signal. If `seconds` is negative, waits for -seconds, and the caller
 * promises to repeat the call. */
int32_t farandole_wait(const int64_t* handles, int32_t count, double seconds);
/* Like farandole_wait, for a single handle. Releases the handle if it returns FARANDOLE_OK. */
int32_t farandole_finish(int64_t handle, double seconds);
/* Makes later work in this CUDA stream wait for the GPU results of these handles. Does not block. Call this after
 * farandole_wait. */
int32_t farandole_join_stream(const int64_t* handles, int32_t count, uint64_t stream);
/* Returns 1 if the core no longer uses the handle's buffers, 0 if it still does, or -code if there is no such
 * handle. On a GPU, the core may still use the buffers after farandole_wait has returned. */
int32_t farandole_settled(int64_t handle);
int32_t farandole_result_of(int64_t handle, farandole_result* result);
/* Writes the numbers in the result's shape, then those in `received`, but at most `capacity` of them. Returns how many
 * there are, or -code. For callers whose signal handlers may call farandole_result_of on the same thread. */
int32_t farandole_sizes_of(int64_t handle, int64_t* sizes, int32_t capacity);
/* Releases the handle at once or, if its call is in flight, as soon as the call is done. The buffers of the call
 * must stay valid until then. */
void farandole_release(int64_t handle);
void farandole_release_all(const int64_t* handles, int32_t count);
/* Passes the memory of a result to the caller, who must free it with farandole_free, or with farandole_free_on on a
 * GPU. Returns NULL if the core does not own memory for this result. farandole_error() then says why: the call has
 * failed, the result was taken earlier or is in the caller's memory, or another thread has shut down. */
void* farandole_take(int64_t handle);
void farandole_free(void* memory);
/* Frees GPU memory after the work that is now in this CUDA stream, and returns 1. Returns 0 if the stream is being
 * captured into a graph; the caller then keeps the memory and tries again later. */
int32_t farandole_free_on(void* memory, uint64_t stream);

/* Allocates GPU memory, which is usable after the work that is now in this CUDA stream. Free the memory with
 * farandole_free_on. */
int32_t farandole_allocate_on(int32_t device, uint64_t bytes, uint64_t stream, void** memory);
/* Returns the CUDA device of this address, or this rank's device if the address is 0. Returns -code on failure. */
int32_t farandole_device_of(uintptr_t address);
/* Makes later work in `stream` wait for the work that is now in `before`. Does not block. */
int32_t farandole_order_streams(int32_t device, uint64_t before, uint64_t stream);

/* Copies between GPU and host memory after the work that is now in this CUDA stream. Returns when the copy is
 * complete. */
int32_t farandole_copy(int32_t device, uintptr_t target, uintptr_t source, uint64_t bytes,
                       uint64_t stream);

/* Writes which ranks a call is waiting for, and why. Waits at most `seconds` for the coordinator. Returns the length
 * of the full text, of which it writes at most `capacity` bytes, or -code. */
int32_t farandole_explain(int64_t handle, double seconds, char* text, int32_t capacity);

/* An XLA FFI handler (version 0.1) that executes a collective within a program compiled for the platform "cpu".
 * Register it with XLA, which then calls it. The argument is an XLA_FFI_CallFrame. The result is an XLA_FFI_Error,
 * or NULL. csrc/api/api_xla.cc lists the attributes. */
void* farandole_xla_collective(void* call_frame);
/* The handler for the platform "CUDA". Returns as soon as the collective is launched. The collective runs in the
 * order of XLA's stream. */
void* farandole_xla_collective_on(void* call_frame);

/* ---- zero copy */
/* Allocates zeroed, page-aligned memory that the other ranks of this host can map, so that collectives need not copy
 * it. May be called before, during and after a job. A forked child sees the parent's content until the child writes
 * to the memory. The parent never sees the child's writes. */
int32_t farandole_allocate(uint64_t bytes, void** memory);
/* Frees memory from farandole_allocate. No call on this memory may be in flight. */
void farandole_deallocate(void* memory);

/* Writes the ranks of a process set, but at most `capacity` of them. Returns the number of ranks, or -code. */
int32_t farandole_set_ranks(int32_t process_set, int32_t* ranks, int32_t capacity);

/* ---- watching */
/* Return the text and the code of the calling thread's last failure. */
const char* farandole_error(void);
int32_t farandole_error_code(void);
/* Both return the total number of rows, or -code. The values stay valid as long as the calling thread lives. */
int32_t farandole_variables(farandole_variable* rows, int32_t capacity);
int32_t farandole_counters(farandole_counter* rows, int32_t capacity);
/* Writes the flight recorder of local rank `local`, with its last `events` events, as JSON, but at most `capacity`
 * bytes. Returns the full length, or -code. `fd` is the recorder memory of another job of this user, or -1 for this
 * job's recorder memory. */
int64_t farandole_flight(int32_t fd, int32_t local, int32_t events, char* text, int64_t capacity);
/* Returns the number of ranks that have a recorder in this memory, or -code. */
int32_t farandole_flight_ranks(int32_t fd);
/* Writes a trace of this rank for Chrome or Perfetto. Rank 0 writes to `path`, and rank N to NAME.rankN.SUFFIX in
 * the same folder. If mark_cycles is 1, the trace marks each batch of log entries. */
int32_t farandole_start_timeline(const char* path, int32_t mark_cycles);
int32_t farandole_stop_timeline(void);
/* Records in this rank's flight recorder how its world was formed (one line per world), then dumps the recorder. */
int32_t farandole_story(const char* text);
/* Adds a line to the flight recorder about something that looks wrong but has not caused a failure, then dumps the
 * recorder. */
int32_t farandole_finding(const char* text);
/* Writes `folder`/flight-rank-N.json for each rank that has a recorder in the memory `fd`. */
int32_t farandole_dump(int32_t fd, const char* folder, const char* reason);
