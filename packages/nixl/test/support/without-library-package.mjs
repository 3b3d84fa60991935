// Preloaded into a process: the optional package with NIXL's libraries is not installed there,
// although the repository may have built it.
import Module from "node:module";

const resolve = Module._resolveFilename;
Module._resolveFilename = (name, ...rest) => {
  if (name.startsWith("@kv/nixl-libs-")) throw new Error(`Cannot find module '${name}'`);
  return resolve.call(Module, name, ...rest);
};
