/* SPDX-License-Identifier: Apache-2.0 */
/* The C ABI of farandole: the only entry to the core. Declarations, enums and `#define N literal` only,
 * because cffi reads this file as it is. Any thread may call any function, unless its comment says otherwise.
 * Functions that return int32_t return FARANDOLE_OK or an error code; farandole_error() then has the text for
 * the calling thread. "-code" is a negated error code. */

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

/* What farandole_wait may return besides the codes above. */
#define FARANDOLE_KEY_BYTES 16
#define FARANDOLE_PENDING 100 /* time is up, or a signal came: run handlers, then wait again */

enum farandole_op {
  FARANDOLE_ALLREDUCE = 0,
  FARANDOLE_BROADCAST = 1,
  FARANDOLE_ALLGATHER = 2,
  FARANDOLE_REDUCESCATTER = 3,
  FARANDOLE_ALLTOALL = 4,
  FARANDOLE_BARRIER = 5,
  FARANDOLE_JOIN = 6,
  FARANDOLE_ADD_SET = 7,    /* shape: the ranks, ascending */
  FARANDOLE_REMOVE_SET = 8, /* root: the set's id; shape, if by_members: its ranks */
  FARANDOLE_SCATTER = 9,    /* other ranks' inputs give dtype and trailing shape only */
  FARANDOLE_SEND = 10,      /* matched with the receive of `root` that has the same set and tag, */
  FARANDOLE_RECEIVE = 11,   /* first in, first out; dtype and number of elements have to agree */
  FARANDOLE_REDUCE = 12     /* only the root's output is written */
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

/* One tensor of one call. Strings and arrays are copied; buffers are not: they must stay valid, and must not
 * be touched, from farandole_submit until the handle is done. */
typedef struct farandole_request {
  int32_t op;
  int32_t reduce_op;
  int32_t dtype;
  int32_t device; /* -1: CPU memory; otherwise a CUDA device */
  /* World rank; for broadcast, scatter and reduce. send: the receiver; receive: the sender, or -1: any member
   * that sends with this tag */
  int32_t root;
  int32_t process_set;
  double prescale; /* result = postscale * reduce(prescale * input) */
  double postscale;
  int32_t ndim;
  const int64_t* shape;
  const void* input; /* C-contiguous; NULL: this rank contributes the identity, or receives */
  /* allreduce, broadcast, reduce: same shape as the input. allgather: as many rows for each member as the input has,
   * so it needs equal inputs. May be the input (not alltoall, scatter); an allgather's input may be where its rows
   * belong; other overlaps are refused. NULL: the result is dropped, or, if only negotiation knows its size (allgather,
   * alltoall, reducescatter, scatter), allocated by the core: see farandole_result */
  void* output;
  int32_t n_splits; /* alltoall, and scatter's root: rows for each member; 0: equal parts */
  const int64_t* splits;
  /* NULL: matched by the order of unnamed calls. send, receive: for people only */
  const char* name;
  int32_t by_members; /* add_set, remove_set: 1: the ranks in the shape make it, and no others */
  int64_t tag;        /* send, receive: not negative */
  /* Where the program makes the call, "train.py:12"; NULL: not known. Calls that match by order, and in which all
   * ranks do the same, should come from one line: see FARANDOLE_CALL_SITES */
  const char* site;
  int32_t any_site; /* 1: ranks may make it on different lines */
} farandole_request;

/* What a finished handle holds. shape and received belong to the calling thread until its next call of
 * farandole_result_of; they outlive the handle and the job. */
typedef struct farandole_result {
  void* output;   /* the request's, or memory that belongs to the handle until farandole_take */
  int32_t absent; /* 1: no rank had a buffer; nothing was written */
  int32_t ndim;
  const int64_t* shape; /* of the output */
  int32_t n_received;
  /* allgather, alltoall: rows received from each member of the set, 0 from one that has joined */
  const int64_t* received;
  int64_t value; /* join: the last rank; add_set: the new set's id; receive: the sender */
} farandole_result;

/* Where this rank is. node[r]: the lowest rank of the shared-memory host of world rank r. blobs: what each
 * rank's farandole_prepare wrote, in rank order. */
typedef struct farandole_world {
  int32_t rank;
  int32_t size;
  const int32_t* node;
  const char* const* blobs;
  const int32_t* blob_bytes;
  /* Address of an MPI_Comm of these ranks in this order, which must stay valid until farandole_shutdown;
   * NULL: all ranks are on one host, or TCP connects the hosts */
  const void* mpi_comm;
  int32_t number; /* of this world in the job's life: a restart makes the next one */
  /* FARANDOLE_KEY_BYTES that each rank derives alike, from a secret and from all blobs; sockets between ranks prove it */
  const char* key;
} farandole_world;

typedef struct farandole_topology {
  int32_t rank, size;
  int32_t local_rank, local_size;
  int32_t cross_rank, cross_size;
  int32_t homogeneous; /* 1: every host has the same number of ranks */
  int32_t world;       /* its number */
} farandole_topology;

typedef struct farandole_variable {
  const char* name;     /* FARANDOLE_... */
  const char* alias;    /* HOROVOD_... with the same meaning, or "" */
  const char* fallback; /* default, as text */
  const char* meaning;
  const char* value;  /* current value, as text */
  int32_t job_wide;   /* 1: rank 0's value applies to all ranks */
  const char* source; /* of the value: "default", "tuning file", "environment" or "rank 0" */
} farandole_variable;

typedef struct farandole_counter {
  const char* name;
  int64_t value;
} farandole_counter;

/* ---- starting and leaving: the caller has to provide one allgather of opaque bytes, no more */
const char* farandole_version(void);
const char* farandole_build_id(void);
/* 1 if this is the user that the process runs as. The kernel's overflow user (nobody) is nobody's own in a user
 * namespace that does not map every user. */
int32_t farandole_is_own_user(uint32_t user);
/* For stall reports, once per process and before farandole_prepare: the signal on which Python's main thread
 * shall write its stacks (0: none), the non-blocking reading end of the pipe that it writes to, and folders,
 * separated by ':', whose frames are left out on top of each stack. Install Python's handler after
 * farandole_stacks, which puts an empty one beneath it. */
int32_t farandole_stack_signal(void);
void farandole_stacks(int32_t signal, int32_t pipe, const char* folders);
/* Texts about this process, before init() too: lines of the MPI that it has loaded (file, binary interface,
 * version; no line: none), a line for each address at which other hosts may reach it, `eth0 10.0.0.1`, and two
 * lines about Unix sockets: how the paths of this user's begin, and what processes have in common that can reach
 * each other's. They return the length, or -code, and write what fits. */
int32_t farandole_mpi(char* text, int32_t capacity);
int32_t farandole_addresses(char* text, int32_t capacity);
int32_t farandole_sockets(char* text, int32_t capacity);
/* Folders, separated by ':', in which to look for libnccl and libnvrtc; before farandole_prepare. */
void farandole_library_folders(const char* folders);
/* Ends this process with `text` on stderr after `seconds`, unless called again before; negative: never. For
 * calls that may block without a limit of their own, such as MPI_Init. Before that with texts[i], if the i-th of
 * `count` processes ends; FARANDOLE_E_PEER if one has ended already. */
int32_t farandole_end_after(double seconds, const char* text, int32_t count,
                            const int32_t* processes, const char* const* texts);
/* Step 1: reads the settings and opens this rank's sockets. Returns the blob's length, or -code. */
int32_t farandole_prepare(char* blob, int32_t capacity);
/* Step 2, after an allgather of the blobs; world->node as MPI reports it: returns the rank whose memory this
 * one can share (perhaps its own), or -code. An allgather of these ranks is world->node of step 3. */
int32_t farandole_probe(const farandole_world* world);
/* Step 3: connects to the others. Fails in bounded time. After a failure, here or on another rank, call
 * farandole_shutdown. */
int32_t farandole_start(const farandole_world* world);
/* Leaves the job. failed: 0 if this rank finished normally; text: the reason, for the peers ("ValueError:
 * ..."). Returns when all have left; at the latest after FARANDOLE_SHUTDOWN_TIMEOUT (FARANDOLE_E_STALL names
 * the ranks that have not) or, if failed, FARANDOLE_LEAVE_TIMEOUT. FARANDOLE_PENDING after `seconds`: call
 * again. After any other result, no thread of this process accesses a buffer of any request, or calls MPI. */
int32_t farandole_shutdown(int32_t failed, const char* text, double seconds);
int32_t farandole_initialized(void);
/* 1: the job has failed, and dead or unreachable ranks will never leave. */
int32_t farandole_broken(void);
/* In a forked child: the parent's. */
int32_t farandole_where(farandole_topology* topology);
/* Call in a forked child: afterwards all functions but farandole_where fail with an explanation. */
void farandole_forked(void);

/* ---- work */
/* Every call is prepared: this checks and keeps it without its buffers, and returns its number, or -code, of which
 * peers are not told (farandole_refuse tells them). Several tensors of one process set, all on the CPU or all on the GPU,
 * are a group: one call, reduced together, all or none. Name, set and site are the first one's. `count` 0: a group of
 * none, which tensors[0], a barrier, names. */
int64_t farandole_prepare_call(const farandole_request* tensors, int32_t count);
/* Submits prepared calls at once, in order, up to the first that fails, whose code is returned; sets the handles of those
 * before. Each call has an input, an output (addresses; 0: none), a stream and a handle for each tensor, one at least.
 * streams: on which the inputs are produced; NULL: all are on the CPU. Peers that wait for the call
 * that fails fail, too. */
int32_t farandole_submit(const int64_t* calls, const uintptr_t* inputs, const uintptr_t* outputs,
                         const uint64_t* streams, int32_t count, int64_t* handles);
/* The same of one call on one tensor on the CPU, for Python, where arrays take time, and a pointer less than its
 * address: a handle, or -code. */
int64_t farandole_submit_one(int64_t call, uintptr_t input, uintptr_t output);
int64_t farandole_submit_pointers(int64_t call, const void* input, void* output);
/* The same for a caller that only waits: ranks of one host complete a small call among themselves. 0: it is done, and
 * there is no handle. Returns a handle after a few milliseconds at most. */
int64_t farandole_call_one(int64_t call, uintptr_t input, uintptr_t output);
int64_t farandole_call_pointers(int64_t call, const void* input, void* output);
void farandole_forget_prepared(int64_t call);
/* Tells the peers of `name` that this rank can't take part: they fail with this code and text instead of
 * waiting. A refused join fails with the next farandole_submit of a join, when all have joined. */
int32_t farandole_refuse(const farandole_request* request, int32_t code, const char* text);
/* For callers that copy an array of the user's, so that the core never sees its address: FARANDOLE_E_ARGUMENT if an
 * earlier call has not ended that writes to these elements or, with `writes`, reads them. `size`: bytes of an element;
 * strides in bytes. Always FARANDOLE_OK outside of a job. */
int32_t farandole_check_unused(uintptr_t address, uint64_t size, int32_t ndim, const int64_t* shape,
                               const int64_t* strides, int32_t writes);
/* Number of unnamed calls that this rank has made in the set, equal on all members. */
int64_t farandole_count_unnamed(int32_t process_set);

/* 1: done, failed, or launched on a GPU (farandole_wait returns at once); 0: in flight; -code: unknown. */
int32_t farandole_poll(int64_t handle);
/* Blocks until all are done or one failed: OK, its code, or FARANDOLE_PENDING after `seconds` or a signal. Negative
 * seconds: after as many positive ones, and the caller then repeats the call, whatever happens meanwhile. */
int32_t farandole_wait(const int64_t* handles, int32_t count, double seconds);
/* Like farandole_wait for one handle, which is released if the result is FARANDOLE_OK. */
int32_t farandole_finish(int64_t handle, double seconds);
/* For handles that farandole_wait has returned: makes later work in this CUDA stream wait for the results of
 * those on a GPU. Does not block the caller. */
int32_t farandole_join_stream(const int64_t* handles, int32_t count, uint64_t stream);
/* 1: the handle's buffers are no longer in use (on a GPU that is later than farandole_wait); 0: they are;
 * -code: no such handle. */
int32_t farandole_settled(int64_t handle);
int32_t farandole_result_of(int64_t handle, farandole_result* result);
/* Releases the handle; one in flight only when it is done, and its buffers must stay valid until then. */
void farandole_release(int64_t handle);
void farandole_release_all(const int64_t* handles, int32_t count);
/* Passes the memory that a result owns to the caller, who frees it by farandole_free (on a GPU
 * farandole_free_on). NULL: there is none, see farandole_error(): the call failed, its result was taken or is
 * in the caller's own memory, or another thread has shut down. */
void* farandole_take(int64_t handle);
void farandole_free(void* memory);
/* The same for GPU memory, freed after the work that is now in this CUDA stream. 0: not yet, because the stream is
 * being captured into a graph: the memory is still the caller's, who tries again later. Else 1. */
int32_t farandole_free_on(void* memory, uint64_t stream);

/* Allocates GPU memory for outputs, usable after the work that is now in this CUDA stream. Free it by
 * farandole_free_on. */
int32_t farandole_allocate_on(int32_t device, uint64_t bytes, uint64_t stream, void** memory);
/* The CUDA device of this address; for 0 the one that this rank uses; or -code. */
int32_t farandole_device_of(uintptr_t address);
/* Makes later work in `stream` wait for what is now in `before`. Does not block the caller. */
int32_t farandole_order_streams(int32_t device, uint64_t before, uint64_t stream);

/* Copies between GPU and host memory after the work that is now in this CUDA stream; returns when it is done. */
int32_t farandole_copy(int32_t device, uintptr_t target, uintptr_t source, uint64_t bytes,
                       uint64_t stream);

/* Whom the call of a handle in flight waits for, and why, as text. Asks the coordinator, for at most
 * `seconds`. Returns the length of the text before it is cut to `capacity`, or -code. */
int32_t farandole_explain(int64_t handle, double seconds, char* text, int32_t capacity);

/* A collective within a program that XLA has compiled: a handler of XLA's FFI (version 0.1) for the platform "cpu",
 * to be registered with XLA and called by it. Both pointers are of XLA's types: XLA_FFI_CallFrame, and XLA_FFI_Error
 * or NULL. csrc/api/api_xla.cc tells the attributes. */
void* farandole_xla_collective(void* call_frame);
/* The same for the platform "CUDA": returns when the collective is launched, in the order of XLA's stream. */
void* farandole_xla_collective_on(void* call_frame);

/* ---- zero copy */
/* Zeroed, page-aligned memory that the other ranks of this host map: collectives on such buffers copy
 * nothing. Before, during and after a job. A forked child sees the parent's content until it writes there;
 * the parent never sees the child's writes. */
int32_t farandole_allocate(uint64_t bytes, void** memory);
/* No call on the memory may be in flight. */
void farandole_deallocate(void* memory);

/* The ranks of a process set: returns their number, or -code; fills at most `capacity`. */
int32_t farandole_set_ranks(int32_t process_set, int32_t* ranks, int32_t capacity);

/* ---- watching */
/* Why the calling thread's last failed call failed. */
const char* farandole_error(void);
int32_t farandole_error_code(void);
/* Both return the number of rows, or -code. Values belong to the calling thread until its next call of
 * farandole_variables. */
int32_t farandole_variables(farandole_variable* rows, int32_t capacity);
int32_t farandole_counters(farandole_counter* rows, int32_t capacity);
/* The flight recorder of local rank `local` as JSON, with its last `events` events; returns the length, or
 * -code; fills at most `capacity`. fd: recorder memory of another job of this user; -1: this job's. */
int64_t farandole_flight(int32_t fd, int32_t local, int32_t events, char* text, int64_t capacity);
/* How many ranks share these recorders, or -code. */
int32_t farandole_flight_ranks(int32_t fd);
/* Traces this rank for Chrome or Perfetto: into PATH on rank 0, NAME.rankN.SUFFIX beside it on others. */
int32_t farandole_start_timeline(const char* path, int32_t mark_cycles);
int32_t farandole_stop_timeline(void);
/* Keeps in this rank's flight recorder how its world came about, a line for each world, and dumps it. */
int32_t farandole_story(const char* text);
/* The same of something that looks wrong, though nothing has failed: a line that is added. */
int32_t farandole_finding(const char* text);
/* Writes FOLDER/flight-rank-N.json for each of these ranks. */
int32_t farandole_dump(int32_t fd, const char* folder, const char* reason);
