#include "common/c_api.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/base/config.h"
#include "common/c_api/convert.h"
#include "common/c_api/memory_table.h"
#include "common/runtime/counter_list.h"
#include "common/runtime/session.h"
#include "common/transport/bootstrap.h"
#include "common/transport/store.h"
#include "common/transport/wiring.h"

struct bagua_store {
  std::unique_ptr<bagua::StoreServer> server;
};

namespace bagua {
namespace {

// The one default engine of this process. Lives for ever: threads may still call when the process
// ends.
struct Process {
  std::mutex starting;  // one bagua_init or bagua_shutdown at a time
  std::mutex mutex;
  std::shared_ptr<Session> session;  // guarded by mutex
  uint64_t next_ticket = 1;          // guarded by mutex
  MemoryTable memory;
};

// Tickets of one session; the next session's begin behind them.
constexpr uint64_t kTicketsPerSession = uint64_t{1} << 40;

std::atomic<Process*> g_process{new Process};
// What a forked child gives up.
std::atomic<Engine*> g_forked_engine{nullptr};
std::atomic<StoreServer*> g_forked_store{nullptr};
thread_local std::string t_last_error;

Process& process() {
  return *g_process.load(std::memory_order_acquire);
}

int Fail(const Status& status) {
  if (!status.ok()) t_last_error = status.message();
  return static_cast<int>(status.code());
}

// Runs `action` -> Status; exceptions become statuses.
template <class Action>
int Guarded(Action action) {
  try {
    return Fail(action());
  } catch (...) {
    return Fail(CaughtStatus());
  }
}

std::shared_ptr<Session> CurrentSession() {
  Process& own = process();
  std::lock_guard lock(own.mutex);
  return own.session;
}

// Runs `action`(Session&) -> Status.
template <class Action>
int WithSession(Action action) {
  return Guarded([&]() -> Status {
    const std::shared_ptr<Session> session = CurrentSession();
    if (session == nullptr)
      return Status(StatusCode::kNotInitialized, "bagua_ext is not initialized: call init() first");
    return action(*session);
  });
}

// Runs `action`(Session&, Plan&) -> Status.
template <class Action>
int WithPlan(uint64_t ticket, Action action) {
  return WithSession([&](Session& session) -> Status {
    const Result<std::shared_ptr<Plan>> plan = session.FindPlan(ticket);
    if (!plan.ok()) return plan.status();
    Result<std::shared_ptr<Plan>> own = plan;
    return action(session, *own.value());
  });
}

// -1 without an engine.
template <class Ask>
int AskEngine(Ask ask) {
  const std::shared_ptr<Session> session = CurrentSession();
  return session == nullptr ? -1 : ask(session->engine());
}

// A child has none of the parent's threads: it forgets the engine and lets its peers see the
// parent's end alone.
void ForgetEngineInChild() {
  if (Engine* const engine = g_forked_engine.exchange(nullptr)) engine->CloseInChild();
  if (StoreServer* const store = g_forked_store.exchange(nullptr)) store->CloseInChild();
  // The old one's locks may be held by threads that do not exist here; it is left behind.
  g_process.store(new Process, std::memory_order_release);
}

void WatchForks() {
  [[maybe_unused]] static const int watched =
      ::pthread_atfork(nullptr, nullptr, ForgetEngineInChild);
}

Result<Membership> Meet(BootstrapOptions options) {
  if (options.size > 1) return Bootstrap(std::move(options));
  Membership alone;
  alone.members.push_back(options.self);
  alone.links.emplace_back();
  return alone;
}

Result<std::unique_ptr<Engine>> StartEngine(BootstrapOptions options, Config config) {
  const Deadline deadline = After(Seconds(config.start_timeout_seconds));
  const int rank = options.rank;
  options.deadline = deadline;
  options.tcp_everywhere = config.transport == "tcp";
  Result<Membership> membership = Meet(std::move(options));
  if (!membership.ok()) return membership.status();
  Result<Wiring> wiring = ConnectWiring(rank, std::move(membership).value(), deadline);
  if (!wiring.ok()) return wiring.status();
  return Engine::Start(std::move(wiring).value(), std::move(config), deadline);
}

Status Initialize(const bagua_init_options_t* options, int (*interrupted)(void)) {
  Process& own = process();
  std::lock_guard starting(own.starting);
  if (CurrentSession() != nullptr) return {};
  Result<BootstrapOptions> bootstrap = ToBootstrapOptions(options);
  if (!bootstrap.ok()) return bootstrap.status();
  Result<Config> config = Config::FromEnvironment();
  if (!config.ok()) return config.status();
  if (interrupted != nullptr)
    bootstrap.value().interrupted = [interrupted] { return interrupted() != 0; };
  WatchForks();
  Result<std::unique_ptr<Engine>> engine =
      StartEngine(std::move(bootstrap).value(), std::move(config).value());
  if (!engine.ok()) return engine.status().WithContext("init");
  g_forked_engine.store(engine.value().get());
  std::lock_guard lock(own.mutex);
  own.session = std::make_shared<Session>(std::move(engine).value(), own.next_ticket);
  own.next_ticket += kTicketsPerSession;
  return {};
}

Status ShutDown() {
  Process& own = process();
  std::lock_guard starting(own.starting);
  const std::shared_ptr<Session> session = CurrentSession();
  if (session == nullptr) return {};
  session->engine().Shutdown();
  g_forked_engine.store(nullptr);
  std::lock_guard lock(own.mutex);
  own.session = nullptr;
  return {};
}

Result<OperationPtr> Convert(Session& session, const bagua_request_t* request) {
  // An alltoall without splits is cut evenly for the ranks of its group.
  const bool splits = request != nullptr && request->kind == BAGUA_ALLTOALL;
  const auto group = splits ? static_cast<uint32_t>(request->group) : 0;
  // Who is no member hears of that, not of splits.
  const bool member = splits && session.engine().GroupRank(group) >= 0;
  return ToOperation(request, member ? session.engine().GroupSize(group) : 0);
}

// The operation's result `index`, if it has one.
Result<const OperationResult*> FindResult(const OperationPtr& operation, int32_t index) {
  if (index < 0 || static_cast<size_t>(index) >= operation->results.size())
    return Status(StatusCode::kInvalidArgument,
                  StrCat(operation->Describe(), " has ", operation->results.size(),
                         " results, no result ", index));
  return &operation->results[static_cast<size_t>(index)];
}

template <class Action>
int WithResult(uint64_t handle, int32_t index, Action action) {
  return WithSession([&](Session& session) -> Status {
    Result<OperationPtr> operation = session.Ended(handle);
    if (!operation.ok()) return operation.status();
    Result<const OperationResult*> result = FindResult(operation.value(), index);
    if (!result.ok()) return result.status();
    action(*result.value());
    return {};
  });
}

Bytes ToBytes(const uint8_t* data, int32_t bytes) {
  if (data == nullptr || bytes <= 0) return {};
  const auto view = std::as_bytes(std::span(data, static_cast<size_t>(bytes)));
  return {view.begin(), view.end()};
}

}  // namespace
}  // namespace bagua

using bagua::Guarded;
using bagua::Status;
using bagua::WithPlan;
using bagua::WithResult;
using bagua::WithSession;

extern "C" {

// ---- Life ---------------------------------------------------------------------------------------

int bagua_init(const bagua_init_options_t* options, int (*interrupted)(void)) {
  return Guarded([&] { return bagua::Initialize(options, interrupted); });
}

int bagua_shutdown(void) {
  return Guarded(bagua::ShutDown);
}

int bagua_is_initialized(void) {
  return bagua::CurrentSession() != nullptr;
}

int bagua_rank(void) {
  return bagua::AskEngine([](const bagua::Engine& engine) { return engine.rank(); });
}

int bagua_size(void) {
  return bagua::AskEngine([](const bagua::Engine& engine) { return engine.size(); });
}

int bagua_local_rank(void) {
  return bagua::AskEngine([](const bagua::Engine& e) { return e.topology().local_rank; });
}

int bagua_local_size(void) {
  return bagua::AskEngine([](const bagua::Engine& e) { return e.topology().local_size; });
}

int bagua_cross_rank(void) {
  return bagua::AskEngine([](const bagua::Engine& e) { return e.topology().cross_rank; });
}

int bagua_cross_size(void) {
  return bagua::AskEngine([](const bagua::Engine& e) { return e.topology().cross_size; });
}

int bagua_is_homogeneous(void) {
  return bagua::AskEngine([](const bagua::Engine& e) { return int{e.topology().homogeneous}; });
}

const char* bagua_last_error(void) {
  return bagua::t_last_error.c_str();
}

const char* bagua_version(void) {
  return BAGUA_VERSION;
}

// ---- Rendezvous store ---------------------------------------------------------------------------

int bagua_store_start(const char* host, int32_t* port, int32_t size, const uint8_t* secret,
                      int32_t secret_bytes, bagua_store_t** store) {
  return Guarded([&]() -> Status {
    auto server =
        bagua::StoreServer::Start(host, *port, size, bagua::ToBytes(secret, secret_bytes));
    if (!server.ok()) return server.status();
    bagua::WatchForks();
    bagua::g_forked_store.store(server.value().get());
    *port = server.value()->port();
    *store = new bagua_store{std::move(server).value()};
    return {};
  });
}

int bagua_store_report_lost(bagua_store_t* store, int32_t rank, const char* why) {
  return Guarded([&]() -> Status {
    store->server->ReportLost(rank, why == nullptr ? "" : why);
    return {};
  });
}

void bagua_store_stop(bagua_store_t* store) {
  if (store != nullptr) {
    bagua::StoreServer* own = store->server.get();
    bagua::g_forked_store.compare_exchange_strong(own, nullptr);
  }
  delete store;
}

// ---- Operations ---------------------------------------------------------------------------------

int bagua_enqueue(const bagua_request_t* request, uint64_t* handle) {
  return WithSession([&](bagua::Session& session) -> Status {
    auto operation = bagua::Convert(session, request);
    if (!operation.ok()) return operation.status();
    auto queued = session.Enqueue(std::move(operation).value());
    if (!queued.ok()) return queued.status();
    *handle = queued.value();
    return {};
  });
}

int bagua_wait(uint64_t handle, double seconds) {
  return WithSession([&](bagua::Session& session) {
    return session.Wait(handle, bagua::After(bagua::Seconds(seconds)));
  });
}

int bagua_poll(uint64_t handle) {
  return WithSession([&](bagua::Session& session) { return session.Poll(handle); });
}

int bagua_run(const bagua_request_t* request, double seconds, uint64_t* handle) {
  return WithSession([&](bagua::Session& session) -> Status {
    *handle = 0;
    auto operation = bagua::Convert(session, request);
    if (!operation.ok()) return operation.status();
    return session.Run(std::move(operation).value(), bagua::After(bagua::Seconds(seconds)), handle);
  });
}

int bagua_result_shape(uint64_t handle, int32_t index, int32_t* ndim, int64_t* shape) {
  return WithResult(handle, index, [&](const bagua::OperationResult& result) {
    *ndim = result.shape.ndim;
    std::copy_n(result.shape.dims.begin(), result.shape.ndim, shape);
  });
}

int bagua_result_splits(uint64_t handle, int64_t* splits) {
  return WithSession([&](bagua::Session& session) -> Status {
    auto operation = session.Ended(handle);
    if (!operation.ok()) return operation.status();
    const std::vector<int64_t>& received = operation.value()->received_splits;
    std::copy(received.begin(), received.end(), splits);
    return {};
  });
}

int bagua_result_data(uint64_t handle, int32_t index, void** data) {
  return WithResult(handle, index,
                    [&](const bagua::OperationResult& result) { *data = result.data; });
}

int bagua_release(uint64_t handle) {
  return WithSession([&](bagua::Session& session) { return session.Release(handle); });
}

// ---- Process sets -------------------------------------------------------------------------------

int bagua_group_add(const int32_t* ranks, int32_t count, double seconds, int32_t* group) {
  return WithSession([&](bagua::Session& session) -> Status {
    auto members = bagua::ToRanks(ranks, count);
    if (!members.ok()) return members.status();
    uint32_t number = 0;
    BAGUA_RETURN_IF_ERROR(session.AddGroup(std::move(members).value(),
                                           bagua::After(bagua::Seconds(seconds)), &number));
    *group = static_cast<int32_t>(number);
    return {};
  });
}

int bagua_group_remove(int32_t group, double seconds) {
  return WithSession([&](bagua::Session& session) {
    return session.RemoveGroup(static_cast<uint32_t>(group), bagua::After(bagua::Seconds(seconds)));
  });
}

int bagua_group_rank(int32_t group) {
  return bagua::AskEngine(
      [group](bagua::Engine& engine) { return engine.GroupRank(static_cast<uint32_t>(group)); });
}

int bagua_group_size(int32_t group) {
  return bagua::AskEngine([group](bagua::Engine& engine) {
    const int size = engine.GroupSize(static_cast<uint32_t>(group));
    return size == 0 ? -1 : size;
  });
}

// ---- Plans --------------------------------------------------------------------------------------

int bagua_plan_create(const bagua_plan_options_t* options, double seconds, uint64_t* plan) {
  return WithSession([&](bagua::Session& session) -> Status {
    auto own = bagua::ToPlanOptions(options);
    if (!own.ok()) return own.status();
    return session.CreatePlan(std::move(own).value(), bagua::After(bagua::Seconds(seconds)), plan);
  });
}

int bagua_plan_bucket_count(uint64_t plan, int32_t* buckets) {
  return WithPlan(plan, [&](bagua::Session&, bagua::Plan& own) -> Status {
    *buckets = static_cast<int32_t>(own.buckets().size());
    return {};
  });
}

int bagua_plan_bucket(uint64_t plan, int32_t bucket, void** data, int64_t* bytes, int32_t* dtype) {
  return WithPlan(plan, [&](bagua::Session&, bagua::Plan& own) -> Status {
    if (bucket < 0 || static_cast<size_t>(bucket) >= own.buckets().size())
      return Status(bagua::StatusCode::kInvalidArgument,
                    bagua::StrCat("plan '", own.name(), "' has no bucket ", bucket));
    const bagua::Bucket& shape = own.buckets()[static_cast<size_t>(bucket)];
    *data = own.bucket_data(static_cast<size_t>(bucket));
    *bytes = static_cast<int64_t>(shape.bytes());
    *dtype = static_cast<int32_t>(shape.dtype);
    bagua::process().memory.Add(*data, own.segment());
    return {};
  });
}

void bagua_memory_release(void* data) {
  bagua::process().memory.Release(data);
}

int bagua_plan_tensor_place(uint64_t plan, int32_t tensor, int32_t* bucket, int64_t* offset) {
  return WithPlan(plan, [&](bagua::Session&, bagua::Plan& own) -> Status {
    if (tensor < 0 || static_cast<size_t>(tensor) >= own.tensor_count())
      return Status(bagua::StatusCode::kInvalidArgument,
                    bagua::StrCat("plan '", own.name(), "' has no tensor ", tensor));
    const bagua::TensorPlace& place = own.places()[static_cast<size_t>(tensor)];
    *bucket = static_cast<int32_t>(place.bucket);
    *offset = static_cast<int64_t>(place.offset);
    return {};
  });
}

int bagua_plan_ready(uint64_t plan, int32_t tensor) {
  return WithPlan(plan, [&](bagua::Session& session, bagua::Plan& own) {
    return session.engine().MakeReady(&own, static_cast<size_t>(tensor));
  });
}

int bagua_plan_finish(uint64_t plan, double seconds) {
  return WithPlan(plan, [&](bagua::Session& session, bagua::Plan& own) {
    return session.engine().FinishStep(&own, bagua::After(bagua::Seconds(seconds)));
  });
}

int bagua_plan_used(uint64_t plan, uint8_t* used) {
  return WithPlan(plan, [&](bagua::Session&, bagua::Plan& own) -> Status {
    std::copy(own.used().begin(), own.used().end(), used);
    return {};
  });
}

int bagua_plan_overlap(uint64_t plan, int64_t* overlapped_bytes, int64_t* total_bytes) {
  return WithPlan(plan, [&](bagua::Session&, bagua::Plan& own) -> Status {
    *overlapped_bytes = own.overlapped_bytes();
    *total_bytes = own.total_bytes();
    return {};
  });
}

int bagua_plan_drop(uint64_t plan) {
  return WithSession([&](bagua::Session& session) { return session.DropPlan(plan); });
}

// ---- Counters -----------------------------------------------------------------------------------

int bagua_counters(const char** names, int64_t* values, int32_t capacity) {
  const std::shared_ptr<bagua::Session> session = bagua::CurrentSession();
  if (session == nullptr) return 0;
  const auto counters = bagua::ReadCounters(session->engine());
  for (int32_t i = 0; i < std::min<int32_t>(capacity, static_cast<int32_t>(counters.size())); ++i) {
    names[i] = counters[static_cast<size_t>(i)].name;
    values[i] = counters[static_cast<size_t>(i)].value;
  }
  return static_cast<int>(counters.size());
}

}  // extern "C"
