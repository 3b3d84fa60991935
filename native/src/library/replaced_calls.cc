#include "library/replaced_calls.h"

#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

namespace kv::nixl {

namespace {

struct Wanted {
  std::string_view library;
  std::string_view symbol;
  void* replacement;
};

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

int replace_in(dl_phdr_info* info, size_t, void* data) {
  const auto& wanted = *static_cast<const Wanted*>(data);
  const std::string_view path = info->dlpi_name == nullptr ? "" : info->dlpi_name;
  if (!path.substr(path.find_last_of('/') + 1).starts_with(wanted.library)) return 0;
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
        auto** const slot = reinterpret_cast<void**>(info->dlpi_addr + relocation.r_offset);
        if (*slot != wanted.replacement) set_address(slot, wanted.replacement);
      }
    }
  }
  return 0;
}

}  // namespace

void set_address(void** slot, void* value) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const from = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) & ~(page - 1));
  // They stay writable: the page may hold data as well.
  if (mprotect(from, page, PROT_READ | PROT_WRITE) == 0) __atomic_store_n(slot, value, __ATOMIC_RELAXED);
}

void replace_calls(std::string_view library, std::string_view symbol, void* replacement) {
  Wanted wanted{library, symbol, replacement};
  dl_iterate_phdr(replace_in, &wanted);
}

}  // namespace kv::nixl
