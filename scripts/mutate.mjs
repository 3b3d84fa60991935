// npm run mutate [-- --mutate FILE,FILE]: Stryker over the mapping and the plan (stryker.config.mjs), file by file: docs/design/mutation.md.
// A file with tests beside it is judged by those tests alone. KV_MUTATE_SCOPE=plan adds all tests that move bytes, KV_MUTATE_SCOPE=proofs also the proofs.
import { spawn } from "node:child_process";
import { existsSync } from "node:fs";
import { join } from "node:path";
import { root } from "./setup.mjs";

const args = process.argv.slice(2);

spawn(join(root, "node_modules/.bin/stryker"), ["run", "stryker.config.mjs", ...args], {
  cwd: root,
  stdio: "inherit",
  env: { KV_MUTATE_TESTS: ownTests().join(";"), ...process.env },
}).on("close", (code) => {
  process.exitCode = code ?? 1;
});

/** The tests beside the files of --mutate; none where a file has no tests beside it. */
function ownTests() {
  const at = args.indexOf("--mutate");
  const files = at < 0 ? [] : (args[at + 1] ?? "").split(",").map((file) => file.replace(/:.*$/, ""));
  if (files.length > 0 && files.every((file) => file.startsWith("packages/topology/")))
    return ["packages/topology/{src,test}/**/*.test.ts"];
  const tests = files.map((file) => file.replace(/\.ts$/, ".test.ts"));
  return tests.every((file) => existsSync(join(root, file))) ? tests : [];
}
