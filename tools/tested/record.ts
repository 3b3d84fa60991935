// Runs a command, and records for the table "tested where" that it has passed on this machine.
//   node --import tsx tools/tested/record.ts ID -- COMMAND…      without a command: only writes the table again
import { spawnSync } from "node:child_process";
import { existsSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { cpus } from "node:os";
import { fileURLToPath } from "node:url";
import { SUBJECTS } from "./subjects.js";
import { type TestedRecord, writePages } from "./table.js";

const [id, , program, ...args] = process.argv.slice(2);
if (id !== undefined) {
  if (!SUBJECTS.some((subject) => subject.id === id)) {
    console.error(`${id} is not one of ${SUBJECTS.map((subject) => subject.id).join(", ")}`);
    process.exit(2);
  }
  const { status } = spawnSync(program ?? "false", args, { stdio: "inherit" });
  if (status !== 0) {
    console.error(`nothing was recorded: the command ended with ${status}`);
    process.exit(1);
  }
  const { header } = process.report.getReport() as { header: { glibcVersionRuntime?: string } };
  const { glibcVersionRuntime: glibc } = header;
  const record: TestedRecord = {
    date: new Date().toISOString().slice(0, 10),
    command: [program, ...args].join(" "),
    machine: [
      `${cpus().length} × ${cpus()[0]?.model ?? process.arch}`,
      ...(glibc === undefined ? [] : [`glibc ${glibc}`]),
      ...gpus(),
    ].join(", "),
  };
  writeFileSync(
    fileURLToPath(new URL(`../../docs/tested/${id}.json`, import.meta.url)),
    `${JSON.stringify(record, null, 2)}\n`,
  );
}
writePages();

/** The models of the machine's NVIDIA GPUs, and the driver's version. */
function gpus(): string[] {
  const driver = "/proc/driver/nvidia";
  if (!existsSync(`${driver}/gpus`)) return [];
  const models = readdirSync(`${driver}/gpus`).map((gpu) => {
    const about = readFileSync(`${driver}/gpus/${gpu}/information`, "utf8");
    return /^Model:\s*(.+)$/m.exec(about)?.[1] ?? "an NVIDIA GPU";
  });
  const version = /Kernel Module.*?(\d+\.\d[\d.]*)/.exec(readFileSync(`${driver}/version`, "utf8"))?.[1];
  return [...models, ...(version === undefined ? [] : [`driver ${version}`])];
}
