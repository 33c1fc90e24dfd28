#include "common/base/config.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace bagua {
namespace {

const char* Variable(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? text : nullptr;
}

template <class T>
Status Read(const char* name, T least, T* value) {
  const char* text = Variable(name);
  if (text == nullptr) return {};
  T parsed{};
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, parsed);
  if (error != std::errc{} || stop != end || !(parsed >= least))
    return Status(StatusCode::kInvalidArgument,
                  StrCat(name, "='", text, "' is not a number of at least ", least,
                         "; set it to one or unset it"));
  *value = parsed;
  return {};
}

Status ReadChoice(const char* name, std::initializer_list<const char*> choices,
                  std::string* value) {
  const char* text = Variable(name);
  if (text == nullptr) return {};
  std::string known;
  for (const char* choice : choices) {
    if (std::strcmp(choice, text) == 0) {
      *value = text;
      return {};
    }
    known += StrCat(known.empty() ? "" : ", ", choice);
  }
  return Status(StatusCode::kInvalidArgument, StrCat(name, "='", text, "' is none of: ", known));
}

}  // namespace

Result<Config> Config::FromEnvironment() {
  Config config;
  for (const Status& status : {
           Read("BAGUA_FUSION_BYTES", size_t{0}, &config.fusion_bytes),
           Read("BAGUA_BUCKET_BYTES", size_t{1}, &config.bucket_bytes),
           Read("BAGUA_CACHE_CAPACITY", size_t{0}, &config.cache_capacity),
           Read("BAGUA_STALL_WARNING_SECONDS", 0.0, &config.stall_warning_seconds),
           Read("BAGUA_TIMEOUT_SECONDS", 0.0, &config.timeout_seconds),
           Read("BAGUA_START_TIMEOUT_SECONDS", 0.0, &config.start_timeout_seconds),
           Read("BAGUA_SPIN_MICROSECONDS", 0.0, &config.spin_microseconds),
           ReadChoice("BAGUA_TRANSPORT", {"auto", "tcp"}, &config.transport),
           Read("BAGUA_SHM_SLOT_BYTES", size_t{64}, &config.shm_slot_bytes),
           Read("BAGUA_SHM_STAGING_BYTES", size_t{1} << 16, &config.shm_staging_bytes),
           ReadChoice("BAGUA_LOG_LEVEL", {"debug", "info", "warning", "error"}, &config.log_level),
       }) {
    if (!status.ok()) return status;
  }
  return config;
}

}  // namespace bagua
