// npm run demo: sets up what is missing, then runs the reference app. Only the app writes to stdout.
import { spawn } from "node:child_process";
import { join } from "node:path";
import { root, setup } from "./setup.mjs";

const args = process.argv.slice(2);
try {
  const named = args.some((word) => /^(--backend=)?libfabric$/i.test(word));
  const { nixl } = await setup(named ? { withLibfabric: true } : {});
  const chosen = args.some((word) => word.startsWith("--transport") || word.startsWith("--backend"));
  if (!nixl.ready && !chosen) {
    process.stderr.write("going on with the embedded transport\n");
    args.push("--transport", "memory");
  }
} catch (error) {
  process.stderr.write(`set-up failed: ${error.message}\n`);
  process.exit(1);
}
const child = spawn(process.execPath, [join(root, "apps/demo/dist/main.js"), ...args], {
  // The app ends when the channel closes: it outlives this script in no case.
  stdio: ["inherit", "inherit", "inherit", "ipc"],
});
for (const signal of ["SIGINT", "SIGTERM", "SIGHUP"]) process.on(signal, () => child.kill(signal));
child.on("close", (code, signal) => {
  process.exitCode = code ?? (signal === "SIGINT" ? 130 : 143);
});
