/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of farandole, the only entry to the core. It holds only declarations, enums and `#define N literal`,
 * because cffi reads this file unchanged. Unless a function's comment says otherwise, any thread may call it, and an
 * int32_t result is FARANDOLE_OK or an error code. After an error, farandole_error() returns its text to the same
 * thread. "-code" stands for a negated error code. */

#define FARANDOLE_ABI_VERSION 18

/* Error codes; each has a Python class. */
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
/* Functions that wait return it after a timeout or a signal. It is not an error: run signal handlers, then call
 * again. */
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
  /* A send and a receive match if each names the other's rank as `root`, and both have the same set and tag. Sends
   * match in the order in which they were made, and so do receives. A send and its receive must agree on dtype and
   * number of elements. */
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

/* One tensor of one call. The core copies strings and arrays, but not input and output. From farandole_submit until
 * farandole_settled returns 1, these must stay valid, and nobody else may access them. */
typedef struct farandole_request {
  int32_t op;
  int32_t reduce_op;
  int32_t dtype;
  int32_t device; /* -1: CPU memory; otherwise a CUDA device */
  /* World rank of the root; send: of the receiver; receive: of the sender, or -1 for any sender with this tag. */
  int32_t root;
  int32_t process_set;
  double prescale; /* result = postscale * reduce(prescale * input) */
  double postscale;
  int32_t ndim;
  const int64_t* shape;
  const void* input; /* C-contiguous; NULL: this rank receives, or contributes the identity */
  /* Memory for the result. In allreduce, broadcast and reduce it has the input's shape. In allgather it has as many
   * rows as the input for each member, so all inputs must have the same shape. In reducescatter it has this rank's
   * rows. Except in alltoall and scatter, it may be the input's memory; a reducescatter's result then lies at the start
   * of that memory. An allgather's input may lie where its rows belong in the output. Other overlaps are refused. NULL:
   * in allgather, alltoall, reducescatter and scatter the core allocates the result (see farandole_result); other calls
   * drop it. */
  void* output;
  int32_t n_splits;      /* length of splits; 0: equal parts */
  const int64_t* splits; /* alltoall, and scatter's root: rows for each member */
  /* NULL: unnamed calls match by their order. The name of a send or receive is only shown to users. */
  const char* name;
  int32_t by_members; /* add_set, remove_set: 1 if only the ranks in the shape take part */
  int64_t tag;        /* send, receive: not negative */
  /* Program line, "train.py:12"; NULL: unknown. Ranks compare it for unnamed calls: see FARANDOLE_CALL_SITES. */
  const char* site;
  int32_t any_site; /* 1: ranks may make this call on different lines */
} farandole_request;

/* Result of a finished call. shape and received stay valid until the calling thread's next farandole_result_of. */
typedef struct farandole_result {
  void* output;   /* the request's output, or memory that the handle owns until farandole_take */
  int32_t absent; /* 1: no rank had an input; nothing was written */
  int32_t ndim;
  const int64_t* shape; /* the shape of the output */
  int32_t n_received;
  /* allgather, alltoall: rows received from each member of the set; a joined member sends 0 */
  const int64_t* received;
  int64_t value; /* join: the last rank; add_set: the new set's id; receive: the sender */
} farandole_result;

/* This rank's world. node[r]: the lowest rank that shares memory with world rank r. blobs: the output of each rank's
 * farandole_prepare, in rank order. */
typedef struct farandole_world {
  int32_t rank;
  int32_t size;
  const int32_t* node;
  const char* const* blobs;
  const int32_t* blob_bytes;
  /* Address of an MPI_Comm of these ranks in this order, valid until farandole_shutdown; NULL: no MPI between hosts. */
  const void* mpi_comm;
  int32_t number; /* of this world; each restart of the job increments it */
  /* FARANDOLE_KEY_BYTES bytes, derived from a secret and all blobs. All ranks have the same key. Both ends of a socket
   * prove that they know the key. */
  const char* key;
} farandole_world;

typedef struct farandole_topology {
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t cross_rank, cross_size;
  int32_t homogeneous; /* 1: every host has the same number of ranks */
  int32_t world;       /* farandole_world.number */
} farandole_topology;

typedef struct farandole_variable {
  const char* name;     /* FARANDOLE_... */
  const char* alias;    /* HOROVOD_... with the same meaning, or "" */
  const char* fallback; /* default, as text */
  const char* meaning;
  const char* value;  /* current value, as text */
  int32_t job_wide;   /* 1: rank 0's value applies to all ranks */
  const char* source; /* origin of the value: "default", "tuning file", "environment" or "rank 0" */
} farandole_variable;

typedef struct farandole_counter {
  const char* name;
  int64_t value;
} farandole_counter;

/* ---- starting and leaving. The caller provides only one allgather of opaque bytes. */
const char* farandole_version(void);
const char* farandole_build_id(void);
/* 1 if this process runs as this user. 0 for the kernel's overflow user (nobody) in a user namespace that does not map
 * every user, because there all unmapped users appear as nobody. */
int32_t farandole_is_own_user(uint32_t user);
/* The signal for stack reports: FARANDOLE_STACK_SIGNAL, else a free one, else 0; or -code. */
int32_t farandole_stack_signal(void);
/* Prepares stack reports. Call once per process, before farandole_prepare. Arguments: the signal on which Python writes
 * its stacks to a pipe (0: none), the pipe's non-blocking read end, and folders, separated by ':', whose frames are
 * omitted at the top of a stack. Install Python's handler afterwards. */
void farandole_stacks(int32_t signal, int32_t pipe, const char* folders);
/* Each of these writes a text about this process, one item per line, at most `capacity` bytes, and returns the full
 * length, or -code. Callable before init(). farandole_mpi: file, binary interface and version of the loaded MPI, or
 * nothing. farandole_addresses: `eth0 10.0.0.1` for each address that other hosts may reach. farandole_sockets: the
 * prefix of this user's socket paths, then a text that is equal in processes that can reach each other's Unix
 * sockets. */
int32_t farandole_mpi(char* text, int32_t capacity);
int32_t farandole_addresses(char* text, int32_t capacity);
int32_t farandole_sockets(char* text, int32_t capacity);
/* Sets the folders, separated by ':', that are searched for libnccl and libnvrtc. Call before farandole_prepare. */
void farandole_library_folders(const char* folders);
/* Starts a watchdog for calls without a time limit, such as MPI_Init. After `seconds` it prints `text` on stderr and
 * ends this process. If processes[i] (a process id) ends before, it prints texts[i] and ends this process at once.
 * Replaces the previous watchdog; negative `seconds` start no new one. Returns FARANDOLE_E_PEER if one of the processes
 * has ended already. */
int32_t farandole_end_after(double seconds, const char* text, int32_t count,
                            const int32_t* processes, const char* const* texts);
/* Step 1: reads the settings and opens this rank's sockets. Returns the blob's length, or -code. */
int32_t farandole_prepare(char* blob, int32_t capacity);
/* Step 2, after an allgather of the blobs, with world->node as MPI reports it. Returns the lowest rank of this rank's
 * host (it may be this rank), or -code. An allgather of the results gives world->node for step 3. */
int32_t farandole_probe(const farandole_world* world);
/* Step 3: connects to the others, in bounded time. After a failure on any rank, call farandole_shutdown. */
int32_t farandole_start(const farandole_world* world);
/* Leaves the job. failed: 0 if this rank finished normally; otherwise text tells the peers why ("ValueError: ...").
 * Returns when all ranks have left. After FARANDOLE_SHUTDOWN_TIMEOUT (if failed, one second) it returns
 * FARANDOLE_E_STALL, and the error's text names the ranks that have not left. Returns FARANDOLE_PENDING after
 * `seconds`: call it again. After any other result, the core neither accesses a request's buffer nor calls MPI. */
int32_t farandole_shutdown(int32_t failed, const char* text, double seconds);
int32_t farandole_initialized(void);
/* 1: the job has failed because ranks are dead or unreachable; those ranks will never leave. */
int32_t farandole_broken(void);
/* In a forked child, returns the parent's topology. */
int32_t farandole_where(farandole_topology* topology);
/* Call in a forked child: afterwards all functions but farandole_where fail with an explanation. */
void farandole_forked(void);

/* ---- work */
/* Prepares a call: checks it and keeps it without its buffers. Returns the call's number, or -code. After a failure,
 * call farandole_refuse to report it to peers. Several tensors of one process set, all on the CPU or all on the GPU,
 * form a group: one call, reduced together or not at all, with the name, set and site of the first tensor. If `count`
 * is 0, tensors[0] must be a barrier; its name becomes the name of an empty group. */
int64_t farandole_prepare_call(const farandole_request* tensors, int32_t count);
/* Submits prepared calls in order. Stops at the first that fails, and returns its error code; that call fails on its
 * peers, too; the calls before it have handles. inputs, outputs, streams and handles have an element for each tensor
 * of each call in turn; an empty group counts as one tensor. Inputs and outputs are addresses (0: none). streams: the
 * CUDA streams that produce the inputs; NULL: all tensors are on the CPU. */
int32_t farandole_submit(const int64_t* calls, const uintptr_t* inputs, const uintptr_t* outputs,
                         const uint64_t* streams, int32_t count, int64_t* handles);
/* Submits a call of one CPU tensor; returns a handle, or -code. Saves Python the time to make arrays. The second form
 * is for cffi, which passes a pointer faster than an address. */
int64_t farandole_submit_one(int64_t call, uintptr_t input, uintptr_t output);
int64_t farandole_submit_pointers(int64_t call, const void* input, void* output);
/* Like farandole_submit_one, for a caller that would wait for the result at once. Ranks of one host complete a small
 * call among themselves. Returns 0 if the call is done; then there is no handle. Returns a handle if the call is not
 * done within 20 ms, has failed, or lacks `input` or `output`, or if a signal has come. */
int64_t farandole_call_one(int64_t call, uintptr_t input, uintptr_t output);
int64_t farandole_call_pointers(int64_t call, const void* input, void* output);
void farandole_forget_prepared(int64_t call);
/* Reports that this rank cannot take part in the request's call: its peers' calls fail with this code and text. A
 * refused join is not reported until this rank makes its next join; when all members have joined, all joins fail. */
int32_t farandole_refuse(const farandole_request* request, int32_t code, const char* text);
/* For callers that pass a copy of a user's array, whose own address the core never sees. Returns FARANDOLE_E_ARGUMENT
 * if an unfinished call writes to these elements or, with `writes`, reads them. `size`: bytes of an element; strides in
 * bytes. Always FARANDOLE_OK outside a job. */
int32_t farandole_check_unused(uintptr_t address, uint64_t size, int32_t ndim, const int64_t* shape,
                               const int64_t* strides, int32_t writes);
/* Number of unnamed calls that this rank has made in the set. It is equal on all members. */
int64_t farandole_count_unnamed(int32_t process_set);

/* 1: done, failed, or launched on a GPU, so farandole_wait returns at once; 0: in flight; -code: unknown handle. */
int32_t farandole_poll(int64_t handle);
/* Blocks until all handles are done or one has failed. Returns FARANDOLE_OK, the failure's code, or FARANDOLE_PENDING
 * after `seconds` or a signal. Negative `seconds`: waits for -seconds, and the caller promises to repeat the call. */
int32_t farandole_wait(const int64_t* handles, int32_t count, double seconds);
/* Like farandole_wait for one handle; releases the handle if the result is FARANDOLE_OK. */
int32_t farandole_finish(int64_t handle, double seconds);
/* Makes later work in this CUDA stream wait for the GPU results of these handles. Call after farandole_wait. Does not
 * block. */
int32_t farandole_join_stream(const int64_t* handles, int32_t count, uint64_t stream);
/* 1: the core no longer uses the handle's buffers (on a GPU, later than farandole_wait returns); 0: it still does;
 * -code: no such handle. */
int32_t farandole_settled(int64_t handle);
int32_t farandole_result_of(int64_t handle, farandole_result* result);
/* Releases the handle at once or, if its call is in flight, when the call is done. Until then the call's buffers must
 * stay valid. */
void farandole_release(int64_t handle);
void farandole_release_all(const int64_t* handles, int32_t count);
/* Passes a result's memory to the caller, who frees it with farandole_free (on a GPU: farandole_free_on). Returns NULL
 * if the core owns no memory of this result; farandole_error() says why: the call has failed, the result was taken
 * before or is in the caller's memory, or another thread has shut down. */
void* farandole_take(int64_t handle);
void farandole_free(void* memory);
/* Frees GPU memory after the work now in this CUDA stream, and returns 1. Returns 0 if the stream is being captured
 * into a graph: the caller keeps the memory, and tries again later. */
int32_t farandole_free_on(void* memory, uint64_t stream);

/* Allocates GPU memory, usable after the work now in this CUDA stream. Free it with farandole_free_on. */
int32_t farandole_allocate_on(int32_t device, uint64_t bytes, uint64_t stream, void** memory);
/* Returns the CUDA device of this address, or this rank's device for address 0; or -code. */
int32_t farandole_device_of(uintptr_t address);
/* Makes later work in `stream` wait for the work now in `before`. Does not block. */
int32_t farandole_order_streams(int32_t device, uint64_t before, uint64_t stream);

/* Copies between GPU and host memory after the work now in this CUDA stream; returns when done. */
int32_t farandole_copy(int32_t device, uintptr_t target, uintptr_t source, uint64_t bytes,
                       uint64_t stream);

/* Writes for which ranks a call waits, and why. Waits at most `seconds` for the coordinator. Returns the length of the
 * full text, of which at most `capacity` bytes are written, or -code. */
int32_t farandole_explain(int64_t handle, double seconds, char* text, int32_t capacity);

/* A handler of XLA's FFI (version 0.1) that executes a collective within a program compiled for the platform "cpu".
 * Register it with XLA, which calls it. Argument: XLA_FFI_CallFrame; result: XLA_FFI_Error, or NULL.
 * csrc/api/api_xla.cc lists the attributes. */
void* farandole_xla_collective(void* call_frame);
/* The handler for the platform "CUDA". Returns when the collective is launched. The collective runs in the order of
 * XLA's stream. */
void* farandole_xla_collective_on(void* call_frame);

/* ---- zero copy */
/* Allocates zeroed, page-aligned memory that the other ranks of this host can map, so collectives need no copies. May
 * be called before, during and after a job. A forked child sees the parent's content until it writes there; the parent
 * never sees the child's writes. */
int32_t farandole_allocate(uint64_t bytes, void** memory);
/* No call on this memory may be in flight. */
void farandole_deallocate(void* memory);

/* Writes the ranks of a process set, at most `capacity`. Returns their number, or -code. */
int32_t farandole_set_ranks(int32_t process_set, int32_t* ranks, int32_t capacity);

/* ---- watching */
/* Text and code of the calling thread's last failure. */
const char* farandole_error(void);
int32_t farandole_error_code(void);
/* Return the number of all rows, or -code. Values stay valid until the calling thread's next farandole_variables. */
int32_t farandole_variables(farandole_variable* rows, int32_t capacity);
int32_t farandole_counters(farandole_counter* rows, int32_t capacity);
/* Writes the flight recorder of local rank `local` with its last `events` events as JSON, at most `capacity` bytes.
 * Returns the full length, or -code. fd: recorder memory of another job of this user; -1: this job's. */
int64_t farandole_flight(int32_t fd, int32_t local, int32_t events, char* text, int64_t capacity);
/* Number of ranks with a recorder in this memory, or -code. */
int32_t farandole_flight_ranks(int32_t fd);
/* Writes a trace of this rank for Chrome or Perfetto: on rank 0 to `path`, on rank N to NAME.rankN.SUFFIX next to it.
 * mark_cycles: 1 marks each batch of log entries. */
int32_t farandole_start_timeline(const char* path, int32_t mark_cycles);
int32_t farandole_stop_timeline(void);
/* Records in this rank's flight recorder how its world was formed (one line for each world), and dumps the recorder. */
int32_t farandole_story(const char* text);
/* Adds a line to the flight recorder about something that looks wrong but has not failed; then dumps the recorder. */
int32_t farandole_finding(const char* text);
/* Writes `folder`/flight-rank-N.json for each rank with a recorder in the memory `fd`. */
int32_t farandole_dump(int32_t fd, const char* folder, const char* reason);
