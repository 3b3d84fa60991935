// Runs a command, and records for the table "tested where" that it has passed on this machine.
//   node --import tsx tools/tested/record.ts ID -- COMMAND…      without a command: only writes the table again
import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { machine } from "./machine.js";
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
  const record: TestedRecord = {
    date: new Date().toISOString().slice(0, 10),
    command: [program, ...args].join(" "),
    machine: machine(),
  };
  writeFileSync(
    fileURLToPath(new URL(`../../docs/tested/${id}.json`, import.meta.url)),
    `${JSON.stringify(record, null, 2)}\n`,
  );
}
writePages();
