// A job in one process: each rank an engine, used by a thread of its own.
#ifndef BAGUA_TESTS_CPP_CLUSTER_H_
#define BAGUA_TESTS_CPP_CLUSTER_H_

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "common/base/config.h"
#include "common/runtime/engine.h"
#include "common/transport/bootstrap.h"
#include "common/transport/store.h"
#include "common/transport/wiring.h"
#include "tests/cpp/sanitized.h"

namespace bagua {

// What joins the ranks. kLoopback: rings on the heap. kShm: shared segments, as processes of one
// host. kTcp: sockets, as processes of different hosts.
enum class Fabric { kLoopback, kShm, kTcp };

inline const char* Name(Fabric fabric) {
  constexpr const char* kNames[] = {"loopback", "shm", "tcp"};
  return kNames[static_cast<int>(fabric)];
}

// The parameters of tests that run over every fabric, alone or for several numbers of ranks, and
// the names of such tests.
inline auto EveryFabric() {
  return testing::Values(Fabric::kLoopback, Fabric::kShm, Fabric::kTcp);
}
inline std::string NameOfFabric(const testing::TestParamInfo<Fabric>& info) {
  return Name(info.param);
}
using FabricAndSize = std::tuple<Fabric, int>;
inline std::string NameOfFabricAndSize(const testing::TestParamInfo<FabricAndSize>& info) {
  return StrCat(Name(std::get<0>(info.param)), "_", std::get<1>(info.param));
}

// Whatever a test waits for comes well before; what does not is a failure of the test.
inline Deadline Patience() {
  return After(Seconds(kSanitized ? 100 : 40));
}

// Without the regular looks for stalls, which would find the work that a lost wake-up left behind.
inline Config UnwatchedConfig() {
  Config config;
  config.stall_warning_seconds = 0;
  config.timeout_seconds = 0;
  return config;
}

// Runs body(rank) for each rank on a thread of its own.
inline void OnEachRank(int size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

class Cluster {
 public:
  using Log = std::function<void(int rank, const std::string& line)>;
  // `config_of` gives each rank its configuration.
  using ConfigOf = std::function<Config(int rank)>;

  Cluster(Fabric fabric, int size, const Config& config = UnwatchedConfig(), Log log = {})
      : Cluster(
            fabric, size, [&config](int) { return config; }, std::move(log)) {}

  Cluster(Fabric fabric, int size, const ConfigOf& config_of, Log log)
      : engines_(size), cords_(size), starts_(size) {
    std::vector<Wiring> loopback;
    std::vector<Membership> memberships;
    if (fabric == Fabric::kLoopback) loopback = MakeLoopbackWiring(size);
    if (fabric == Fabric::kShm) memberships = MakeLocalMemberships(size);
    if (fabric == Fabric::kTcp) StartStore(size);
    OnEachRank(size, [&](int rank) {
      const auto wire = [&]() -> Result<Wiring> {
        if (fabric == Fabric::kLoopback) return std::move(loopback[rank]);
        if (fabric == Fabric::kShm) return Connect(rank, std::move(memberships[rank]));
        return MeetAndConnect(rank, size);
      };
      Result<Wiring> wiring = wire();
      if (!wiring.ok()) {
        starts_[rank] = wiring.status();
        return;
      }
      Logger::Sink sink;
      if (log) sink = [log, rank](LogLevel, const std::string& line) { log(rank, line); };
      Result<std::unique_ptr<Engine>> engine =
          Engine::Start(std::move(wiring).value(), config_of(rank), Patience(), std::move(sink));
      starts_[rank] = engine.status();
      if (engine.ok()) engines_[rank] = std::move(engine).value();
    });
  }

  // How each rank's start went; a test that starts ranks that fit together checks started().
  const std::vector<Status>& starts() const { return starts_; }
  bool started() const {
    for (const Status& status : starts_) {
      EXPECT_TRUE(status.ok()) << status.message();
      if (!status.ok()) return false;
    }
    return true;
  }

  int size() const { return static_cast<int>(engines_.size()); }
  Engine& engine(int rank) { return *engines_[rank]; }
  void Destroy(int rank) { engines_[rank].reset(); }

  void Run(const std::function<void(int rank, Engine& engine)>& body) {
    ASSERT_TRUE(started());
    OnEachRank(size(), [&](int rank) { body(rank, *engines_[rank]); });
  }

  // Breaks the rank's lifelines without a word, as its death does. Not with kLoopback.
  void CutLifelines(int rank) {
    // It falls silent first: what it finds out itself while the rest is cut reaches nobody.
    for (const int direction : {SHUT_WR, SHUT_RD})
      for (const UniqueFd& cord : cords_[rank])
        if (cord.valid()) ::shutdown(cord.get(), direction);
  }

 private:
  static Bytes Secret() { return Bytes(32, std::byte{7}); }

  void StartStore(int size) {
    Result<std::unique_ptr<StoreServer>> store = StoreServer::Start("127.0.0.1", 0, size, Secret());
    EXPECT_TRUE(store.ok()) << store.status().message();
    store_ = std::move(store).value();
  }

  Result<Wiring> MeetAndConnect(int rank, int size) {
    BootstrapOptions options;
    options.rank = rank;
    options.size = size;
    options.rendezvous = StrCat("127.0.0.1:", store_->port());
    options.secret = Secret();
    options.tcp_everywhere = true;
    options.self.pid = ::getpid();
    options.self.host_id = StrCat("host-", rank);
    options.deadline = Patience();
    Result<Membership> membership = Bootstrap(std::move(options));
    if (!membership.ok()) return membership.status();
    return Connect(rank, std::move(membership).value());
  }

  Result<Wiring> Connect(int rank, Membership membership) {
    for (const PeerLink& link : membership.links)
      cords_[rank].emplace_back(
          link.lifeline.valid() ? ::fcntl(link.lifeline.get(), F_DUPFD_CLOEXEC, 0) : -1);
    return ConnectWiring(rank, std::move(membership), Patience());
  }

  std::unique_ptr<StoreServer> store_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<std::vector<UniqueFd>> cords_;  // copies of each rank's lifelines
  std::vector<Status> starts_;
};

}  // namespace bagua

#endif  // BAGUA_TESTS_CPP_CLUSTER_H_
