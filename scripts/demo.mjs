// npm run demo: installs what is missing, then runs the demo. Only the demo writes to stdout.
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { checkArguments, usesLibfabric } from "./demo-arguments.mjs";
import { root, setup } from "./setup.mjs";

const args = process.argv.slice(2);
if (args.includes("--version")) {
  const { version } = JSON.parse(readFileSync(join(root, "apps/demo/package.json"), "utf8"));
  process.stdout.write(`${version}\n`);
  process.exit(0);
}
const { help, error: wrong } = checkArguments(args);
if (help !== undefined || wrong !== undefined) {
  if (help !== undefined) process.stdout.write(help);
  else process.stderr.write(`kv-demo: ${wrong} [KV_CONFIG_INVALID]\n`);
  process.exit(help === undefined ? 2 : 0);
}
// A server by hand runs over NIXL: without it, its own error says what to do.
const isRole = ["prefill", "decode", "instance", "proxy"].includes(args[0]);
try {
  const { nixl } = await setup({
    tests: false,
    ...(usesLibfabric(args, process.env) ? { withLibfabric: true } : {}),
  });
  const isTransportGiven = args.some(
    (argument) => argument.startsWith("--transport") || argument.startsWith("--backend"),
  );
  if (!nixl.ready && !isTransportGiven && !isRole) {
    process.stderr.write("continuing with the embedded transport\n");
    args.push("--transport", "memory");
  }
} catch (error) {
  process.stderr.write(`set-up failed: ${error.message}\n`);
  process.exit(2);
}
const child = spawn(process.execPath, [join(root, "apps/demo/dist/main.js"), ...args], {
  // The demo ends when this channel closes, so it never outlives this script.
  stdio: ["inherit", "inherit", "inherit", "ipc"],
});
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
child.on("close", (code, signal) => {
  process.exitCode = code ?? (signal === "SIGINT" ? 130 : 143);
});
