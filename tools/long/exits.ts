// Many processes that use NIXL and end at random places of their lives: each with exit code 0, and with all that it wrote.
//   node --import tsx tools/long/exits.ts [--count 200] [--seed WORD] [--only NUMBER] [--jobs 2]
import { spawn } from "node:child_process";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import { drawExit, type Exit, OUTPUT_BYTES } from "./exit.js";

const { values } = parseArgs({
  options: {
    count: { type: "string", default: "200" },
    seed: { type: "string", default: `${Date.now()}` },
    only: { type: "string" },
    jobs: { type: "string", default: "2" },
  },
});
const TIMEOUT_MS = 120_000;
const file = fileURLToPath(new URL("./exiting.ts", import.meta.url));

/** Undefined when it ended as it should. */
function complaint(exit: Exit): Promise<string | undefined> {
  return new Promise((resolve, reject) => {
    const child = spawn(process.execPath, ["--import", "tsx", file, JSON.stringify(exit)], {
      env: { ...process.env, ...(exit.infiniband ? { UCX_MODULES: "^cuda" } : {}) },
      stdio: ["ignore", "pipe", "pipe"],
    });
    let writtenBytes = 0;
    let stderr = "";
    child.stdout.on("data", (chunk: Buffer) => {
      writtenBytes += chunk.length;
    });
    child.stderr.on("data", (chunk: Buffer) => {
      stderr += chunk.toString();
    });
    const timer = setTimeout(() => child.kill("SIGKILL"), TIMEOUT_MS);
    child.once("error", reject);
    child.once("close", (code, signal) => {
      clearTimeout(timer);
      if (code === 0 && writtenBytes === OUTPUT_BYTES) return resolve(undefined);
      const how = signal === null ? `exit code ${code}` : `signal ${signal}`;
      resolve(`${how}, ${writtenBytes} of ${OUTPUT_BYTES} bytes\n${stderr.slice(-2000)}`);
    });
  });
}

const { seed, only } = values;
const numbers =
  only === undefined ? Array.from({ length: Number(values.count) }, (_, i) => i) : [Number(only)];
let failed = 0;
let done = 0;

async function lane(): Promise<void> {
  for (let number = numbers.shift(); number !== undefined; number = numbers.shift()) {
    const exit = drawExit(seed, number);
    const wrong = await complaint(exit);
    done += 1;
    if (wrong !== undefined) {
      failed += 1;
      console.log(`FAIL  exit ${number} ${JSON.stringify(exit)}: ${wrong}`);
      console.log(`      replay: node --import tsx tools/long/exits.ts --seed ${seed} --only ${number}`);
    }
    if (done % 25 === 0) console.log(`${done} processes have ended (seed ${seed})`);
  }
}

await Promise.all(Array.from({ length: Number(values.jobs) }, lane));
console.log(`exits: ${done - failed} passed, ${failed} failed`);
process.exitCode = failed === 0 && done > 0 ? 0 : 1;
