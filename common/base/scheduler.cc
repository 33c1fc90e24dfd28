#include "common/base/scheduler.h"

#include <algorithm>

namespace bagua {

void Scheduler::Waiter::Unlink() {
  if (!linked_) return;
  linked_ = false;
  if (scheduler_->cursor_ == this) scheduler_->cursor_ = next_;
  (previous_ ? previous_->next_ : scheduler_->head_) = next_;
  (next_ ? next_->previous_ : scheduler_->tail_) = previous_;
}

void Scheduler::Link(Waiter* waiter) {
  waiter->linked_ = true;
  waiter->previous_ = tail_;
  waiter->next_ = nullptr;
  (tail_ ? tail_->next_ : head_) = waiter;
  tail_ = waiter;
}

void Scheduler::Resume(Waiter* waiter, const Status& status) {
  waiter->Unlink();
  waiter->status_ = status;
  // The frame that holds `waiter` may be gone when this returns.
  waiter->coroutine_.resume();
}

bool Scheduler::Poll() {
  bool resumed = false;
  Waiter* const last = tail_;  // waits that begin during this pass are for the next one
  bool more = head_ != nullptr;
  cursor_ = head_;
  while (more && cursor_ != nullptr) {
    Waiter* const waiter = cursor_;
    more = waiter != last;
    cursor_ = waiter->next_;
    if (!waiter->Ready()) continue;
    resumed = true;
    Resume(waiter, failure_);
  }
  cursor_ = nullptr;
  return resumed;
}

void Scheduler::Fail(const Status& failure) {
  if (!failure_.ok()) return;
  failure_ = failure;
  while (head_ != nullptr) Resume(head_, failure_);
}

std::vector<int> Scheduler::AwaitedPeers() const {
  std::vector<int> peers;
  for (const Waiter* waiter = head_; waiter != nullptr; waiter = waiter->next_)
    if (waiter->peer_ != kNoPeer) peers.push_back(waiter->peer_);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

bool Scheduler::IsAwaited(int peer) const {
  for (const Waiter* waiter = head_; waiter != nullptr; waiter = waiter->next_)
    if (waiter->peer_ == peer) return true;
  return false;
}

}  // namespace bagua
