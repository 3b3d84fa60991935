// What a shared library asks of the system that loads it, as readelf (binutils) tells.
import { spawnSync } from "node:child_process";

function readelf(option, file) {
  const { status, stdout, error } = spawnSync("readelf", ["--wide", option, file], { encoding: "utf8" });
  if (status === 0) return stdout;
  throw new Error(
    `readelf ${option} ${file} ended with ${error?.message ?? status}; it is part of binutils: apt-get install binutils`,
  );
}

const unique = (values) => [...new Set(values)].sort();

/** Libraries, versions of their symbols, such as GLIBC_2.17, and what it exports. */
export function elfNeeds(file) {
  const all = (text, pattern) => unique(Array.from(text.matchAll(pattern), ([, found]) => found));
  return {
    libraries: all(readelf("--dynamic", file), /\(NEEDED\).*\[(.*)\]/g),
    versions: all(readelf("--version-info", file), /\bName: (\w+_[\w.]+)/g),
    exports: all(readelf("--dyn-syms", file), /\b(?:GLOBAL|WEAK)\s+DEFAULT\s+(?!UND)\d+\s+([^\s@]+)/g),
  };
}

const isNewer = (version, than) => {
  const [a, b] = [version, than].map((text) => text.split(".").map(Number));
  for (let part = 0; part < Math.max(a.length, b.length); part++) {
    if ((a[part] ?? 0) !== (b[part] ?? 0)) return (a[part] ?? 0) > (b[part] ?? 0);
  }
  return false;
};

// Parts of glibc, and no C++ runtime: which one a system has is not known.
const ALLOWED = /^(lib(c|m|dl|pthread|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+)$/;

/** Why a library with these needs does not run on every Linux with that glibc; empty when it does. */
export function complaints({ libraries, versions, exports }, { glibc, exported }) {
  return [
    ...libraries.filter((name) => !ALLOWED.test(name)).map((name) => `needs the library ${name}`),
    ...versions
      .filter((name) => !name.startsWith("GLIBC_") || isNewer(name.slice("GLIBC_".length), glibc))
      .map((name) => `needs ${name}, newer than or other than GLIBC_${glibc}`),
    ...exports
      .filter((name) => !exported.includes(name))
      .map((name) => `exports ${name}, which may take the place of another library's`),
  ];
}
