#include "peers/agent_metadata.h"

#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <iterator>

namespace kv::nixl {

namespace {

constexpr string_view kMagic = "nixlSerDes|";
constexpr size_t kMaxMetadataBytes = 64u << 20;
constexpr uint64_t kMaxBackends = 64;
constexpr int kMemoryTypes = 5;  // DRAM, VRAM, BLOCK, OBJECT, FILE
// Address, length and device. A backend's own data follows.
constexpr size_t kDescriptorBytes = 24;

// Reads entries: tag, length in 8 bytes, value, bar.
class Reader {
 public:
  explicit Reader(string_view bytes) : bytes_(bytes) {}

  string_view entry(string_view tag) {
    uint64_t length = 0;
    if (bytes_.substr(at_, tag.size()) != tag) fail("\"" + string(tag) + "\" is missing");
    if (bytes_.size() - at_ < tag.size() + sizeof(length)) fail("it is cut short");
    memcpy(&length, bytes_.data() + at_ + tag.size(), sizeof(length));
    at_ += tag.size() + sizeof(length);
    if (length >= bytes_.size() - at_)
      fail("an entry of " + to_string(length) + " bytes is longer than the rest");
    const string_view value = bytes_.substr(at_, length);
    at_ += length;
    if (bytes_[at_] != '|') fail("an entry does not end in a bar");
    ++at_;
    return value;
  }

  template <typename T>
  T number(string_view tag) {
    const string_view value = entry(tag);
    if (value.size() != sizeof(T))
      fail("\"" + string(tag) + "\" has " + to_string(value.size()) + " bytes");
    T number;
    memcpy(&number, value.data(), sizeof(T));
    return number;
  }

  size_t at() const { return at_; }
  void skip(size_t length) { at_ += length; }
  bool at_end() const { return at_ == bytes_.size(); }

  [[noreturn]] void fail(const string& why) const {
    throw Failure("KV_AGENT_METADATA_INVALID",
                  to_string(bytes_.size()) + " bytes are not NIXL agent metadata: at byte " +
                      to_string(at_) + " " + why,
                  "pass the peer's localMetadata() whole and unchanged");
  }

 private:
  string_view bytes_;
  size_t at_ = 0;
};

void read_descriptors(Reader& reader, StatedMemory& memory) {
  if (reader.entry("nixlDList") != "nixlSDList")
    reader.fail("a list of descriptors is of another kind");
  const auto type = reader.number<int>("t");
  if (type < 0 || type >= kMemoryTypes)
    reader.fail("memory type " + to_string(type) + " does not exist");
  const auto count = reader.number<uint64_t>("n");
  if (count == 0) reader.fail("a list of descriptors is empty");
  for (uint64_t index = 0; index < count; ++index) {
    const string_view descriptor = reader.entry("");
    if (descriptor.size() < kDescriptorBytes)
      reader.fail("a descriptor has " + to_string(descriptor.size()) + " bytes");
    uint64_t address = 0;
    uint64_t length = 0;
    uint64_t device = 0;
    memcpy(&address, descriptor.data(), sizeof(address));
    memcpy(&length, descriptor.data() + sizeof(address), sizeof(length));
    memcpy(&device, descriptor.data() + sizeof(address) + sizeof(length), sizeof(device));
    if (address + length < address) reader.fail("a descriptor goes beyond the end of memory");
    memory.add(static_cast<MemoryType>(type), device, address, address + length);
  }
}

}  // namespace

void StatedMemory::add(MemoryType type, uint64_t device, uint64_t first, uint64_t end) {
  auto& ranges = ranges_[{type, device}];
  // Adjacent ranges merge with the new one.
  auto at = ranges.upper_bound(end);
  while (at != ranges.begin() && std::prev(at)->second >= first) {
    at = std::prev(at);
    first = std::min(first, at->first);
    end = std::max(end, at->second);
    at = ranges.erase(at);
  }
  ranges[first] = end;
}

void StatedMemory::add(const StatedMemory& other) {
  for (const auto& [place, ranges] : other.ranges_) {
    for (const auto& [first, end] : ranges) add(place.first, place.second, first, end);
  }
}

bool StatedMemory::holds(MemoryType type, const Row& row) const {
  const auto found = ranges_.find({type, row.device});
  if (found == ranges_.end()) return false;
  const auto has = [&](uint64_t first, uint64_t end) {
    const auto after = found->second.upper_bound(first);
    return after != found->second.begin() && std::prev(after)->second >= end;
  };
  if (has(row.address, row.end())) return true;
  // The gaps of a row need not be registered.
  for (uint64_t index = 0; index < row.count; ++index) {
    const uint64_t first = row.address + index * row.stride;
    if (!has(first, first + row.length)) return false;
  }
  return true;
}

Bytes local_metadata(Agent agent) {
  void* data = nullptr;
  size_t length = 0;
  check(capi::get_local_md(agent, &data, &length), "KV_AGENT_INVALID",
        "NIXL has no metadata of this agent");
  return take_bytes(data, length);
}

Bytes take_bytes(void* data, size_t length) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  Bytes copy(bytes, bytes + length);
  free(data);
  return copy;
}

Bytes join_metadata(const vector<Bytes>& parts) {
  Bytes joined;
  uint64_t sections = 0;
  size_t count_at = 0;
  for (const Bytes& part : parts) {
    const AgentMetadata metadata = read_metadata(part);
    // The number of sections is an entry: tag, length, number, bar.
    const size_t count_of_part = metadata.sections_at - sizeof(sections) - 1;
    if (joined.empty()) {
      count_at = count_of_part;
      joined = part;
    } else {
      joined.insert(joined.end(), part.begin() + static_cast<std::ptrdiff_t>(metadata.sections_at),
                    part.end());
    }
    uint64_t more = 0;
    memcpy(&more, part.data() + count_of_part, sizeof(more));
    sections += more;
  }
  memcpy(joined.data() + count_at, &sections, sizeof(sections));
  return joined;
}

AgentMetadata read_metadata(const Bytes& bytes) {
  const string_view view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  Reader reader(view);
  if (view.size() > kMaxMetadataBytes)
    reader.fail("there are more than " + to_string(kMaxMetadataBytes) + " bytes");
  if (!view.starts_with(kMagic)) reader.fail("NIXL's magic is missing");
  reader.skip(kMagic.size());
  AgentMetadata metadata;
  metadata.agent = reader.entry("Agent");
  const auto printable = [](char letter) { return letter >= ' ' && letter <= '~'; };
  if (metadata.agent.empty() || metadata.agent.size() > 255 ||
      !std::ranges::all_of(metadata.agent, printable)) {
    reader.fail("the agent's name is not 1 to 255 printable ASCII characters");
  }
  const auto connections = reader.number<uint64_t>("Conns");
  if (connections > kMaxBackends) reader.fail("there are " + to_string(connections) + " backends");
  for (uint64_t index = 0; index < connections; ++index) {
    const string backend(reader.entry("t"));
    metadata.connections[backend] = reader.entry("c");
  }
  if (reader.entry("") != "MemSection") reader.fail("the memory section is missing");
  const auto sections = reader.number<uint64_t>("nixlSecElms");
  metadata.sections_at = reader.at();
  for (uint64_t index = 0; index < sections; ++index) {
    if (reader.entry("bknd").empty()) reader.fail("a section names no backend");
    read_descriptors(reader, metadata.memory);
  }
  if (!reader.at_end()) reader.fail("there are bytes after the end");
  return metadata;
}

}  // namespace kv::nixl
