// Plan memory that was handed out through the border.
#ifndef BAGUA_COMMON_C_API_MEMORY_TABLE_H_
#define BAGUA_COMMON_C_API_MEMORY_TABLE_H_

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "common/transport/segment.h"

namespace bagua {

// Buckets that were handed out live until their last reference ends, whatever becomes of the
// engine. Thread-safety: any thread.
class MemoryTable {
 public:
  void Add(void* data, std::shared_ptr<Segment> segment) {
    std::lock_guard lock(mutex_);
    Entry& entry = entries_[data];
    entry.segment = std::move(segment);
    ++entry.references;
  }
  void Release(void* data) {
    std::shared_ptr<Segment> last;  // unmapped after the lock
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(data);
    if (found == entries_.end() || --found->second.references > 0) return;
    last = std::move(found->second.segment);
    entries_.erase(found);
  }

 private:
  struct Entry {
    std::shared_ptr<Segment> segment;
    int references = 0;
  };
  std::mutex mutex_;
  std::map<void*, Entry> entries_;  // guarded by mutex_
};

}  // namespace bagua

#endif  // BAGUA_COMMON_C_API_MEMORY_TABLE_H_
