// What the tests of rendezvous and bootstrap share: a job whose ranks are threads of this process.
#ifndef BAGUA_TESTS_CPP_RENDEZVOUS_FIXTURE_H_
#define BAGUA_TESTS_CPP_RENDEZVOUS_FIXTURE_H_

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/transport/bootstrap.h"
#include "common/transport/handshake.h"
#include "common/transport/links.h"
#include "common/transport/socket.h"
#include "common/transport/store.h"
#include "common/transport/store_channel.h"

namespace bagua::rendezvous_test {

using Outcome = Result<Membership>;
using std::string;

inline Bytes Secret(int seed = 0) {
  return Bytes(32, static_cast<std::byte>(seed));
}

inline bool Contains(const string& text, const string& part) {
  return text.find(part) != string::npos;
}

// Open descriptors of this process.
int OpenDescriptors();

bool WaitFor(int fd, short events);

class Job {
 public:
  explicit Job(int size, bool tcp = false) : size_(size), tcp_(tcp) {
    Result<std::unique_ptr<StoreServer>> started =
        StoreServer::Start("127.0.0.1", 0, size, Secret());
    EXPECT_TRUE(started.ok()) << started.status().message();
    store_ = std::move(started).value();
    address_ = StrCat("127.0.0.1:", store_->port());
  }

  BootstrapOptions OptionsOf(int rank, double seconds = 20) const {
    BootstrapOptions options;
    options.rank = rank;
    options.size = size_;
    options.rendezvous = address_;
    options.secret = Secret();
    options.tcp_everywhere = tcp_;
    options.self.pid = ::getpid();
    options.self.host_id = "testhost/boot/1";
    options.self.framework = "test";
    options.deadline = After(Seconds(seconds));
    return options;
  }

  StoreServer& store() { return *store_; }
  void StopStore() { store_.reset(); }
  const string& address() const { return address_; }
  int port() const { return store_->port(); }

 private:
  const int size_;
  const bool tcp_;
  std::unique_ptr<StoreServer> store_;
  string address_;
};

// Runs Bootstrap for each of `options` on a thread of its own.
class Ranks {
 public:
  explicit Ranks(std::vector<BootstrapOptions> options)
      : outcomes_(options.size()), ended_(options.size()) {
    for (size_t i = 0; i < options.size(); ++i)
      threads_.emplace_back([this, i, option = std::move(options[i])]() mutable {
        outcomes_[i].emplace(Bootstrap(std::move(option)));
        ended_[i] = Clock::now();
      });
  }
  ~Ranks() { Join(); }

  std::vector<Outcome> Take() {
    Join();
    std::vector<Outcome> outcomes;
    for (std::optional<Outcome>& outcome : outcomes_) outcomes.push_back(std::move(*outcome));
    return outcomes;
  }
  // How long after `time` the last rank returned.
  double SecondsSince(Deadline time) {
    Join();
    const Deadline last = *std::max_element(ended_.begin(), ended_.end());
    return Seconds(last - time).count();
  }

 private:
  void Join() {
    for (std::thread& thread : threads_)
      if (thread.joinable()) thread.join();
  }
  std::vector<std::optional<Outcome>> outcomes_;
  std::vector<Deadline> ended_;
  std::vector<std::thread> threads_;
};

std::vector<Outcome> RunAll(const Job& job, int size);

void ExpectFailure(const Outcome& outcome, StatusCode code, std::vector<string> parts);

// One rank whose every step the test decides.
class HandRank {
 public:
  HandRank(const Job& job, int rank, Bytes secret = Secret());

  static UniqueFd ConnectTo(int port);

  const Status& status() const { return status_; }
  StoreChannel& channel() { return *channel_; }
  void Hang() { channel_.reset(); }

  void Report(int size, bool tcp = false, double patience = 20);

  // The next message of the store; nothing once it hung up or kept silent for 5 s.
  std::optional<StoreMessage> Hear();

  RoundTable HearTable();
  Membership ConnectAll(RoundTable table, bool tcp);

 private:
  const int rank_;
  const Bytes secret_;
  UniqueFd fd_;
  std::optional<Handshake> handshake_;
  std::optional<StoreChannel> channel_;
  Status status_;
  Listeners listeners_;
};

std::vector<UniqueFd*> SocketsOf(PeerLink* link);

// Every socket of every link leads to the socket of the same purpose of the peer.
void ExpectConnected(std::vector<Outcome>* outcomes, bool tcp);

// Connections that send nothing, parts of a hello, noise, or hang up at once.
class Noise {
 public:
  explicit Noise(unsigned seed) : random_(seed) {}

  void Throw(const SocketAddress& address);

 private:
  std::mt19937 random_;
  std::vector<UniqueFd> open_;
};

}  // namespace bagua::rendezvous_test

#endif  // BAGUA_TESTS_CPP_RENDEZVOUS_FIXTURE_H_
