// What a shared library requires of the system, read with readelf (binutils).
import { spawnSync } from "node:child_process";

const MAX_OUTPUT_BYTES = 64 << 20;

function readelf(option, file) {
  const { status, stdout, error } = spawnSync("readelf", ["--wide", option, file], {
    encoding: "utf8",
    maxBuffer: MAX_OUTPUT_BYTES,
  });
  if (status === 0) return stdout;
  throw new Error(
    `readelf ${option} ${file} ended with ${error?.message ?? status}; it is part of binutils: apt-get install binutils`,
  );
}

const unique = (values) => [...new Set(values)].sort();

const all = (text, pattern) => unique(Array.from(text.matchAll(pattern), ([, found]) => found));

/** The libraries and the symbol versions that it needs, such as GLIBC_2.17. */
export const neededLibraries = (file) => ({
  libraries: all(readelf("--dynamic", file), /\(NEEDED\).*\[(.*)\]/g),
  versions: all(readelf("--version-info", file), /\bName: (\w+_[\w.]+)/g),
});

/** Adds the symbols that it imports and exports. */
export function elfNeeds(file) {
  return {
    ...neededLibraries(file),
    imports: all(readelf("--dyn-syms", file), /\b(?:GLOBAL|WEAK)\s+DEFAULT\s+UND\s+([^\s@]+)/g),
    exports: all(
      readelf("--dyn-syms", file),
      /\b(?:GLOBAL|WEAK)\s+DEFAULT\s+(?!UND)\d+\s+([^\s@]+)/g,
    ),
  };
}

export const isNewer = (version, than) => {
  const [a, b] = [version, than].map((text) => text.split(".").map(Number));
  for (let part = 0; part < Math.max(a.length, b.length); part++) {
    if ((a[part] ?? 0) !== (b[part] ?? 0)) return (a[part] ?? 0) > (b[part] ?? 0);
  }
  return false;
};

// Only glibc. The version of a C++ runtime differs between systems.
const ALLOWED = /^(lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+)$/;

// A timed wait follows the wall clock unless its condition has another clock.
const sleepsByWallClock = (imports) =>
  imports.includes("pthread_cond_timedwait") && !imports.includes("pthread_condattr_setclock");

/** Why a library does not run on every Linux with that glibc. Empty when it does. */
export function violations({ libraries, versions, imports, exports }, { glibc, exported }) {
  return [
    ...(sleepsByWallClock(imports) ? ["waits by the clock of the day, which can be set back"] : []),
    ...libraries.filter((name) => !ALLOWED.test(name)).map((name) => `needs the library ${name}`),
    ...versions
      .filter((name) => !name.startsWith("GLIBC_") || isNewer(name.slice("GLIBC_".length), glibc))
      .map((name) => `needs ${name}, which is not part of GLIBC_${glibc}`),
    ...exports
      .filter((name) => !exported.includes(name))
      .map((name) => `exports ${name}, which could replace a symbol of another library`),
  ];
}
