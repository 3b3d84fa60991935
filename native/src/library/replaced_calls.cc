#include "library/replaced_calls.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

namespace kv::nixl {

namespace {

struct Wanted {
  std::string_view library;
  std::string_view symbol;
  std::vector<void**> found;
};

bool is_named(const dl_phdr_info& info, std::string_view library) {
  std::string_view file = info.dlpi_name == nullptr ? "" : info.dlpi_name;
  file.remove_prefix(file.find_last_of('/') + 1);
  // Not libuct_ib for libuct.
  return file.starts_with(library) && file.size() > library.size() && (file[library.size()] == '.' || file[library.size()] == '-');
}

// The parts of a library's dynamic section that name the functions it calls.
struct Calls {
  const ElfW(Sym)* symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela)* relocations[2] = {};
  size_t bytes[2] = {};
};

Calls calls_of(const dl_phdr_info& info, const ElfW(Dyn)* entry) {
  // The C library has made addresses of these, except where the section is read-only.
  const auto at = [&](ElfW(Addr) value) { return value < info.dlpi_addr ? value + info.dlpi_addr : value; };
  Calls calls;
  for (; entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB: calls.symbols = reinterpret_cast<const ElfW(Sym)*>(at(entry->d_un.d_ptr)); break;
      case DT_STRTAB: calls.names = reinterpret_cast<const char*>(at(entry->d_un.d_ptr)); break;
      case DT_JMPREL: calls.relocations[0] = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr)); break;
      case DT_PLTRELSZ: calls.bytes[0] = entry->d_un.d_val; break;
      case DT_RELA: calls.relocations[1] = reinterpret_cast<const ElfW(Rela)*>(at(entry->d_un.d_ptr)); break;
      case DT_RELASZ: calls.bytes[1] = entry->d_un.d_val; break;
      default: break;
    }
  }
  return calls;
}

int find_in(dl_phdr_info* info, size_t, void* data) {
  auto& wanted = *static_cast<Wanted*>(data);
  if (!is_named(*info, wanted.library)) return 0;
  for (int index = 0; index < info->dlpi_phnum; ++index) {
    const ElfW(Phdr)& header = info->dlpi_phdr[index];
    if (header.p_type != PT_DYNAMIC) continue;
    const Calls calls = calls_of(*info, reinterpret_cast<const ElfW(Dyn)*>(info->dlpi_addr + header.p_vaddr));
    if (calls.symbols == nullptr || calls.names == nullptr) continue;
    for (size_t table = 0; table < 2; ++table) {
      const size_t count = calls.relocations[table] == nullptr ? 0 : calls.bytes[table] / sizeof(ElfW(Rela));
      for (size_t at = 0; at < count; ++at) {
        const ElfW(Rela)& relocation = calls.relocations[table][at];
        const auto symbol = ELF64_R_SYM(relocation.r_info);
        if (symbol == 0 || calls.names + calls.symbols[symbol].st_name != wanted.symbol) continue;
        wanted.found.push_back(reinterpret_cast<void**>(info->dlpi_addr + relocation.r_offset));
      }
    }
  }
  return 0;
}

std::vector<std::string> paths_of(std::string_view library) {
  struct Search {
    std::string_view library;
    std::vector<std::string> paths;
  } search{library, {}};
  const auto note = [](dl_phdr_info* info, size_t, void* data) {
    auto& into = *static_cast<Search*>(data);
    if (is_named(*info, into.library)) into.paths.emplace_back(info->dlpi_name);
    return 0;
  };
  dl_iterate_phdr(note, &search);
  return search.paths;
}

}  // namespace

void set_address(void** slot, void* value) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const from = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) & ~(page - 1));
  // They stay writable: the page may hold data as well.
  if (mprotect(from, page, PROT_READ | PROT_WRITE) == 0) __atomic_store_n(slot, value, __ATOMIC_RELAXED);
}

std::vector<void**> addresses_in(std::string_view library, std::string_view symbol) {
  Wanted wanted{library, symbol, {}};
  dl_iterate_phdr(find_in, &wanted);
  return wanted.found;
}

void replace_calls(std::string_view library, std::string_view symbol, void* replacement) {
  for (void** const slot : addresses_in(library, symbol)) {
    if (*slot != replacement) set_address(slot, replacement);
  }
}

bool is_loaded(std::string_view library) { return !paths_of(library).empty(); }

void* function_of(std::string_view library, const char* symbol) {
  const std::vector<std::string> paths = paths_of(library);
  if (paths.size() != 1) return nullptr;
  // It stays loaded: its tables of addresses are changed.
  void* const handle = dlopen(paths[0].c_str(), RTLD_LAZY | RTLD_NOLOAD);
  return handle == nullptr ? nullptr : dlsym(handle, symbol);
}

}  // namespace kv::nixl
