// npm run demo: installs what is missing, then runs the demo. Only the demo writes to stdout.
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { checkArguments, usesLibfabric } from "./demo-arguments.mjs";
import { endWithNpm, runProgram } from "./end-with-npm.mjs";
import { root, setupOrEnd } from "./setup.mjs";

endWithNpm();
const args = process.argv.slice(2);
const { help, error: wrong } = args.includes("--version")
  ? { help: version() }
  : checkArguments(args);
if (wrong !== undefined) {
  process.stderr.write(`kv-demo: ${wrong} [KV_CONFIG_INVALID]\n`);
  process.exit(2);
}
if (help !== undefined) {
  // As @kv/program's programs do: a reader that has gone away ends it quietly.
  process.stdout.on("error", (error) => {
    if (error.code === "EPIPE") process.exit(0);
    process.stderr.write(
      `kv-demo: stdout cannot be written: ${error.message} [KV_CONFIG_INVALID]\n`,
    );
    process.exit(2);
  });
  await new Promise((resolve) => process.stdout.write(help, resolve));
  process.exit(0);
}
// A server by hand runs over NIXL: without it, its own error says what to do.
const isRole = ["prefill", "decode", "instance", "proxy"].includes(args[0]);
const { nixl } = await setupOrEnd({
  tests: false,
  only: "@kv/demo",
  ...(usesLibfabric(args, process.env) ? { withLibfabric: true } : {}),
});
const isTransportGiven = args.some(
  (argument) => argument.startsWith("--transport") || argument.startsWith("--backend"),
);
if (!nixl.ready && !isTransportGiven && !isRole) {
  process.stderr.write("continuing with the embedded transport\n");
  args.push("--transport", "memory");
}
runProgram(join(root, "apps/demo/dist/main.js"), args);

function version() {
  const manifest = readFileSync(join(root, "apps/demo/package.json"), "utf8");
  return `${JSON.parse(manifest).version}\n`;
}
