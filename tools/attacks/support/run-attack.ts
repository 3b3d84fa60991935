// Runs one attack file, and writes its row as JSON as the last line. Argument: the file.
import { pathToFileURL } from "node:url";
import type { AttackModule } from "./attack.js";

const { run } = (await import(pathToFileURL(process.argv[2] ?? "").href)) as AttackModule;
process.argv.splice(2, 1);
const row = await run();
// A connection or a timer that an attack leaves must not keep the process.
process.stdout.write(`\n${JSON.stringify(row)}\n`, () => process.exit(row.ok ? 0 : 1));
