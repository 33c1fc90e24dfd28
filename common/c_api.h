// The border of libbagua_core: the only header that bindings include.
//
// Conventions
//  - Every function that can fail returns a bagua_status_t as int. After a value other than
//  BAGUA_OK
//    (or BAGUA_IN_PROGRESS) bagua_last_error() gives, for the calling thread, the text: operation,
//    tensor, ranks, both values, next step.
//  - Nothing throws through this border. All functions may be called from any thread.
//  - One engine per process, made by bagua_init. Functions that need it return
//    BAGUA_NOT_INITIALIZED before bagua_init and after bagua_shutdown.
//  - `count` is elements, `bytes` octets, `size` ranks, `seconds` a double.
#ifndef BAGUA_COMMON_C_API_H_
#define BAGUA_COMMON_C_API_H_

#include <stdint.h>

#if defined(__GNUC__)
#define BAGUA_EXPORT __attribute__((visibility("default")))
#else
#define BAGUA_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum bagua_status {
  BAGUA_OK = 0,
  BAGUA_IN_PROGRESS = 1,
  BAGUA_NOT_INITIALIZED = 2,
  BAGUA_INVALID_ARGUMENT = 3,  // this rank alone; nothing was submitted
  BAGUA_MISMATCH = 4,          // the same on every rank; the job stays usable
  BAGUA_PEER_LOST = 5,         // sticky: shut down and init again
  BAGUA_TIMEOUT = 6,
  BAGUA_ABORTED = 7,  // sticky: this or another rank ended the job's communication
  BAGUA_INTERNAL = 8,
} bagua_status_t;

typedef enum bagua_dtype {
  BAGUA_UINT8 = 0,
  BAGUA_INT8 = 1,
  BAGUA_INT16 = 2,
  BAGUA_INT32 = 3,
  BAGUA_INT64 = 4,
  BAGUA_FLOAT16 = 5,
  BAGUA_BFLOAT16 = 6,
  BAGUA_FLOAT32 = 7,
  BAGUA_FLOAT64 = 8,
  BAGUA_BOOL = 9,
} bagua_dtype_t;

typedef enum bagua_reduce_op {
  BAGUA_AVERAGE = 0,
  BAGUA_SUM = 1,
  BAGUA_ADASUM = 2,
  BAGUA_MIN = 3,
  BAGUA_MAX = 4,
  BAGUA_PRODUCT = 5,
} bagua_reduce_op_t;

typedef enum bagua_kind {
  BAGUA_ALLREDUCE = 0,
  BAGUA_ALLGATHER = 1,
  BAGUA_BROADCAST = 2,
  BAGUA_REDUCESCATTER = 3,
  BAGUA_ALLTOALL = 4,
  BAGUA_BARRIER = 5,
  BAGUA_JOIN = 6,  // see below
} bagua_kind_t;

// ---- Life ---------------------------------------------------------------------------------------

typedef struct bagua_init_options {
  int32_t rank;
  int32_t size;
  // "host:port" of the rendezvous store. NULL or "" is allowed for size 1 alone.
  const char* rendezvous;
  // Key of the HMAC handshake; the same bytes on every rank. At least 16 bytes when size > 1.
  const uint8_t* secret;
  int32_t secret_bytes;
  // Names this host to the others; NULL derives it from boot id, host name and network namespace.
  const char* host_id;
  // Names this rank's framework in messages, e.g. "torch". May be NULL.
  const char* framework;
} bagua_init_options_t;

// Meets the other ranks. Blocks until all are there, at most BAGUA_START_TIMEOUT_SECONDS.
// `interrupted` (may be NULL) is asked about every 100 ms; non-zero ends the wait with
// BAGUA_ABORTED.
BAGUA_EXPORT int bagua_init(const bagua_init_options_t* options, int (*interrupted)(void));
// Says goodbye and ends. Operations in flight fail with BAGUA_ABORTED. Idempotent.
BAGUA_EXPORT int bagua_shutdown(void);
BAGUA_EXPORT int bagua_is_initialized(void);
// -1 when not initialized.
BAGUA_EXPORT int bagua_rank(void);
BAGUA_EXPORT int bagua_size(void);
BAGUA_EXPORT int bagua_local_rank(void);
BAGUA_EXPORT int bagua_local_size(void);
BAGUA_EXPORT int bagua_cross_rank(void);
BAGUA_EXPORT int bagua_cross_size(void);
// 1 if all hosts hold equally many ranks, 0 if not, -1 when not initialized.
BAGUA_EXPORT int bagua_is_homogeneous(void);
// Text of the calling thread's last failure; "" if none. Valid until its next call.
BAGUA_EXPORT const char* bagua_last_error(void);
BAGUA_EXPORT const char* bagua_version(void);

// ---- Rendezvous store, for launchers and for rank 0 where none serves one -----------------------

typedef struct bagua_store bagua_store_t;
// Serves a store for `size` ranks on a thread of its own. `host` "127.0.0.1" keeps it on loopback.
// `*port` 0 takes a free port and is set to it.
BAGUA_EXPORT int bagua_store_start(const char* host, int32_t* port, int32_t size,
                                   const uint8_t* secret, int32_t secret_bytes,
                                   bagua_store_t** store);
// Tells ranks that are waiting in bagua_init that `rank` is gone; `why` reads like "exited with
// code 3". They fail with BAGUA_PEER_LOST at once.
BAGUA_EXPORT int bagua_store_report_lost(bagua_store_t* store, int32_t rank, const char* why);
BAGUA_EXPORT void bagua_store_stop(bagua_store_t* store);

// ---- Operations ---------------------------------------------------------------------------------

typedef struct bagua_tensor {
  void* data;  // contiguous, row-major; may be NULL when it holds no element
  int32_t dtype;
  int32_t device;  // -1: CPU
  int32_t ndim;
  const int64_t* shape;  // copied by the call
} bagua_tensor_t;

typedef struct bagua_request {
  int32_t kind;       // bagua_kind_t
  int32_t group;      // 0: all ranks; else a number that bagua_group_add gave
  const char* name;   // NULL or "": matched by the order in which ranks submit unnamed operations
  int32_t reduce_op;  // allreduce, reducescatter
  int32_t root;       // broadcast: a global rank, which must be in the group
  double prescale;
  double postscale;
  // One tensor; allreduce, allgather and reducescatter take several ("grouped": one agreement, one
  // name, results all or none). barrier: none.
  int32_t tensor_count;
  const bagua_tensor_t* inputs;
  // allreduce, broadcast: where the result goes, as many as inputs; may equal them (in place).
  // NULL: in place. allgather, reducescatter, alltoall: NULL; see `allocate`.
  const bagua_tensor_t* outputs;
  // alltoall: rows of the first dimension for each rank; NULL: even.
  const int64_t* splits;
  int32_t split_count;
  // alltoall: where the rows received from each rank of the group are written before `done` is
  // called, as many entries as the group has members; NULL: see bagua_result_splits.
  int64_t* received_splits;
  // allgather, reducescatter, alltoall: gives the memory of result `index` once its shape is known,
  // on a thread of the core. NULL function: the core keeps the result, see bagua_result_data.
  // Returning NULL for a non-empty result fails the operation.
  void* (*allocate)(void* context, int32_t index, int32_t ndim, const int64_t* shape);
  // Called exactly once when the operation ended and no memory of it is touched any more, on a
  // thread of the core or inside a call of this API. It may call bagua_enqueue, bagua_poll,
  // bagua_release and bagua_plan_ready, nothing that waits. It is not called if bagua_enqueue
  // fails. NULL allowed.
  void (*done)(void* context, int status, const char* message);
  void* context;
} bagua_request_t;

// Starts an operation. Input and output memory must stay valid until it ended. 0 is never a handle.
BAGUA_EXPORT int bagua_enqueue(const bagua_request_t* request, uint64_t* handle);
// Waits at most `seconds` (negative: without limit). BAGUA_IN_PROGRESS when time is up; otherwise
// the operation's own status. Does not release the handle. The calling thread helps to carry the
// operation out.
BAGUA_EXPORT int bagua_wait(uint64_t handle, double seconds);
// The operation's status, BAGUA_IN_PROGRESS while it runs; never blocks.
BAGUA_EXPORT int bagua_poll(uint64_t handle);
// bagua_enqueue and bagua_wait in one call; on BAGUA_IN_PROGRESS `*handle` lives and must be waited
// for and released, on any other value it is 0 and already released -- unless the core keeps the
// result (no `allocate` given for an operation that needs it), when it lives until bagua_release.
BAGUA_EXPORT int bagua_run(const bagua_request_t* request, double seconds, uint64_t* handle);
// Dimensions of result `index` (allgather, reducescatter, alltoall) after BAGUA_OK. `shape` holds
// at least 16 entries.
BAGUA_EXPORT int bagua_result_shape(uint64_t handle, int32_t index, int32_t* ndim, int64_t* shape);
// alltoall, after BAGUA_OK: rows received from each rank of the group; `splits` holds
// bagua_group_size(group) entries.
BAGUA_EXPORT int bagua_result_splits(uint64_t handle, int64_t* splits);
// Memory of result `index` when no `allocate` was given; valid until bagua_release.
BAGUA_EXPORT int bagua_result_data(uint64_t handle, int32_t index, void** data);
// Forgets a handle; the operation itself goes on if it has not ended.
BAGUA_EXPORT int bagua_release(uint64_t handle);

// BAGUA_JOIN: this rank has nothing more to submit. The request names a group and no tensor; it
// ends when all ranks of the group have joined. `outputs` may point to one int32 tensor of one
// element, which receives the global rank that joined last, the same everywhere. Until then
//  - allreduces of the other ranks with op Sum or Average go on with zeros from this one, Average
//    still dividing by the size of the group; so do the steps of plans, which end with as many
//    steps made as on the others (the buckets' memory on this rank is written);
//  - everything else that the others submit is BAGUA_MISMATCH, naming the joined ranks, on those
//    that submitted it. The job stays usable;
//  - this rank may submit nothing on the group and make no step of its plans, nor join in the midst
//    of a step: BAGUA_INVALID_ARGUMENT.
// Waiting for others that still work is no timeout. Operations in flight when a rank joins, this
// one's or others', end as usual.

// ---- Process sets: groups of some of the ranks --------------------------------------------------
//
// Sets may overlap; each has its own order of operations, and disjoint ones run side by side. An
// operation or plan on a set that this rank is no member of, or that does not exist, is
// BAGUA_INVALID_ARGUMENT at the call. Sets end with the engine.

// Adds the set of `ranks`, given in any order. Every rank of the job calls it with the same ranks,
// members or not; BAGUA_MISMATCH on all, naming both lists, if they differ. `*group` is then the
// set's number, the same on every rank, never 0 and never used again. Ranks that are doubled or do
// not exist are BAGUA_INVALID_ARGUMENT on this rank alone. Waits as bagua_wait does; after
// BAGUA_IN_PROGRESS the call is to be repeated with the same ranks. A rank asks for one change of
// sets at a time.
BAGUA_EXPORT int bagua_group_add(const int32_t* ranks, int32_t count, double seconds,
                                 int32_t* group);
// Removes a set; called, and repeated after BAGUA_IN_PROGRESS, as bagua_group_add. BAGUA_MISMATCH
// on all, naming them, if a rank has operations of the set in flight; the set stays then. Its plans
// fail from here on. The set of all ranks cannot be removed.
BAGUA_EXPORT int bagua_group_remove(int32_t group, double seconds);
// This rank's place in the set, 0 to size - 1; -1 if it is no member, there is no such set, or not
// initialized.
BAGUA_EXPORT int bagua_group_rank(int32_t group);
// Number of ranks in the set, also for ranks outside of it; -1 if there is no such set, or not
// initialized.
BAGUA_EXPORT int bagua_group_size(int32_t group);

// ---- Registered plans: a training step's buckets, agreed once -----------------------------------
//
// Tensors are cut into buckets in the order given: one dtype a bucket, closed when the next tensor
// would pass bucket_bytes. A bucket's tensors lie one after another in one flat memory that the
// ranks of a host share. Per step: write each tensor's gradient into its place, bagua_plan_ready
// for each, bagua_plan_finish; after that the reduced values stand in the same place. Buckets are
// exchanged in order, each as soon as its last tensor is ready and all buckets before it have
// started; nothing is negotiated.

typedef struct bagua_plan_tensor {
  const char* name;
  int32_t dtype;
  int32_t ndim;
  const int64_t* shape;
} bagua_plan_tensor_t;

typedef struct bagua_plan_options {
  const char* name;
  int32_t group;
  int32_t tensor_count;
  const bagua_plan_tensor_t* tensors;
  int64_t bucket_bytes;  // 0: the default (BAGUA_BUCKET_BYTES)
  int32_t reduce_op;
  double prescale;
  double postscale;
  const char* codec;  // "none", "fp16", "bf16"; NULL is "none"
  // Further settings of the caller that must be equal on all ranks, as "name=value"; may be NULL.
  const char* agreed;
  // Optional: bucket of each tensor, not decreasing (groups given by the user). NULL: cut by bytes.
  const int32_t* bucket_of;
} bagua_plan_options_t;

// Registers a plan on every rank of the group: all must call it with equal arguments, else
// BAGUA_MISMATCH on all with a table of the differences. Waits as bagua_wait does and is to be
// called again with the same `*plan` after BAGUA_IN_PROGRESS; set `*plan` to 0 before the first
// call.
BAGUA_EXPORT int bagua_plan_create(const bagua_plan_options_t* options, double seconds,
                                   uint64_t* plan);
BAGUA_EXPORT int bagua_plan_bucket_count(uint64_t plan, int32_t* buckets);
// Memory of bucket `bucket`: its tensors, one after another. Each call adds a reference that ends
// with bagua_memory_release(*data): the memory outlives the plan and the engine for as long.
BAGUA_EXPORT int bagua_plan_bucket(uint64_t plan, int32_t bucket, void** data, int64_t* bytes,
                                   int32_t* dtype);
BAGUA_EXPORT void bagua_memory_release(void* data);
// Where tensor `tensor` lies: bucket and offset in elements.
BAGUA_EXPORT int bagua_plan_tensor_place(uint64_t plan, int32_t tensor, int32_t* bucket,
                                         int64_t* offset);
// The value of tensor `tensor` stands in its place; it must not be touched until bagua_plan_finish
// returned BAGUA_OK. Ready twice in one step is BAGUA_INVALID_ARGUMENT. Never blocks.
BAGUA_EXPORT int bagua_plan_ready(uint64_t plan, int32_t tensor);
// Ends the step: tensors not ready count as zeros (the core writes them), all buckets are
// exchanged. Waits as bagua_wait does; call again after BAGUA_IN_PROGRESS.
BAGUA_EXPORT int bagua_plan_finish(uint64_t plan, double seconds);
// After bagua_plan_finish: used[i] is 1 if at least one rank had made tensor i ready in that step.
BAGUA_EXPORT int bagua_plan_used(uint64_t plan, uint8_t* used);
// Bytes of this step's buckets that were already exchanged when bagua_plan_finish was called first
// (overlap with the computation), and all bytes; sums over steps since the plan was made.
BAGUA_EXPORT int bagua_plan_overlap(uint64_t plan, int64_t* overlapped_bytes, int64_t* total_bytes);
// Drops a plan on this rank. Buckets in flight are ended first.
BAGUA_EXPORT int bagua_plan_drop(uint64_t plan);

// ---- Counters -----------------------------------------------------------------------------------

// Fills up to `capacity` names (static strings) and values; returns how many there are.
BAGUA_EXPORT int bagua_counters(const char** names, int64_t* values, int32_t capacity);

#ifdef __cplusplus
}  // extern "C"
#endif

#endif  // BAGUA_COMMON_C_API_H_
