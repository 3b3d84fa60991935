#include "repairs/replaced_calls.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace kv::nixl {

namespace {

bool is_named(const dl_phdr_info& info, string_view library) {
  string_view file = info.dlpi_name == nullptr ? "" : info.dlpi_name;
  file.remove_prefix(file.find_last_of('/') + 1);
  // Excludes libuct_ib for libuct.
  return file.starts_with(library) && file.size() > library.size() &&
         (file[library.size()] == '.' || file[library.size()] == '-');
}

vector<dl_phdr_info> libraries_named(string_view library) {
  struct Search {
    string_view library;
    vector<dl_phdr_info> found;
  } search{library, {}};
  const auto note = [](dl_phdr_info* info, size_t, void* data) {
    auto& into = *static_cast<Search*>(data);
    if (is_named(*info, into.library)) into.found.push_back(*info);
    return 0;
  };
  dl_iterate_phdr(note, &search);
  return search.found;
}

// Parts of the dynamic section that name called functions.
struct Calls {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * relocations[2] = {};
  size_t bytes[2] = {};
};

Calls calls_of(const dl_phdr_info& info, const ElfW(Dyn) * entry) {
  // The C library has made these addresses, except in a read-only section.
  const auto at = [&](ElfW(Addr) value) {
    return value < info.dlpi_addr ? value + info.dlpi_addr : value;
  };
  Calls calls;
  for (; entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB:
        calls.symbols = reinterpret_cast<const ElfW(Sym)*>(at(entry->d_un.d_ptr));
        break;
      case DT_STRTAB: calls.names = reinterpret_cast<const char*>(at(entry->d_un.d_ptr)); break;
      case DT_JMPREL:
        calls.relocations[0] = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr));
        break;
      case DT_PLTRELSZ: calls.bytes[0] = entry->d_un.d_val; break;
      case DT_RELA:
        calls.relocations[1] = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr));
        break;
      case DT_RELASZ: calls.bytes[1] = entry->d_un.d_val; break;
      default: break;
    }
  }
  return calls;
}

void add_slots(const dl_phdr_info& info, const Calls& calls, string_view symbol,
               vector<void**>& found) {
  if (calls.symbols == nullptr || calls.names == nullptr) return;
  for (size_t table = 0; table < 2; ++table) {
    const size_t count =
        calls.relocations[table] == nullptr ? 0 : calls.bytes[table] / sizeof(ElfW(Rela));
    for (size_t at = 0; at < count; ++at) {
      const ElfW(Rela) & relocation = calls.relocations[table][at];
      const auto number = ELF64_R_SYM(relocation.r_info);
      if (number == 0 || calls.names + calls.symbols[number].st_name != symbol) continue;
      found.push_back(reinterpret_cast<void**>(info.dlpi_addr + relocation.r_offset));
    }
  }
}

}  // namespace

bool set_address(void** slot, void* value) {
  if (__atomic_load_n(slot, __ATOMIC_RELAXED) == value) return true;
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const from = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) & ~(page - 1));
  // Stays writable, since the page may hold data too.
  if (mprotect(from, page, PROT_READ | PROT_WRITE) != 0) return false;
  __atomic_store_n(slot, value, __ATOMIC_RELAXED);
  return true;
}

vector<void**> addresses_in(string_view library, string_view symbol) {
  vector<void**> found;
  for (const dl_phdr_info& info : libraries_named(library)) {
    for (int index = 0; index < info.dlpi_phnum; ++index) {
      const ElfW(Phdr) & header = info.dlpi_phdr[index];
      if (header.p_type != PT_DYNAMIC) continue;
      add_slots(info,
                calls_of(info, reinterpret_cast<const ElfW(Dyn)*>(info.dlpi_addr + header.p_vaddr)),
                symbol, found);
    }
  }
  return found;
}

bool replace_calls(string_view library, string_view symbol, void* replacement) {
  const auto slots = addresses_in(library, symbol);
  // Tries all, even after one that cannot be changed.
  return !slots.empty() && std::ranges::count_if(slots, [&](void** slot) {
                             return !set_address(slot, replacement);
                           }) == 0;
}

bool is_loaded(string_view library) { return !libraries_named(library).empty(); }

void* function_of(string_view library, const char* symbol) {
  const auto found = libraries_named(library);
  if (found.size() != 1) return nullptr;
  // The library stays loaded, since its tables are changed.
  void* const handle = dlopen(found[0].dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : dlsym(handle, symbol);
}

}  // namespace kv::nixl
