// npm run kv-proxy, kv-epp, kv-pool, kv-peer, kv-nixl, kv-plan, kv-neuron: sets up what is missing,
// then runs that program. Only the program writes to stdout.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { selftest } from "../nixl/selftest.mjs";
import { endWithNpm } from "./end-with-npm.mjs";
import { root, setupOrEnd } from "./setup.mjs";

const NATIVE = {
  epp: "none",
  "kv-plan": "none",
  neuron: "addon",
  nixl: "addon",
  peer: "nixl",
  pool: "nixl",
  proxy: "none",
};

endWithNpm();
const [name] = process.argv.splice(2, 1);
// What a program says of itself needs the dependencies and the build, and no native code.
const asks = process.argv
  .slice(2)
  .some((arg) => ["--help", "-h", "--version", "help", "complete"].includes(arg));
// @kv/neuron's addon is built with what tests load.
const tests = name === "neuron" || process.argv[2] === "selftest";
await setupOrEnd({
  native: asks ? "none" : NATIVE[name],
  tests: tests && !asks,
  only: `@kv/${name}`,
});
// A test of what is published, which only a checkout can pack.
if (name === "nixl" && process.argv[2] === "selftest") {
  await selftest().catch((error) => {
    process.stderr.write(`selftest: ${error.message}\n${error.stderr ?? ""}`);
    process.exit(1);
  });
  process.exit(0);
}
// npm runs scripts in the root; paths are relative to the folder of the command.
process.chdir(process.env.INIT_CWD ?? process.cwd());
const folder = join(root, "packages", name);
const { bin } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
await import(pathToFileURL(join(folder, Object.values(bin)[0])).href);
