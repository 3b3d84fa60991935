// Owns a child process, and says its id.
import { ChildProcess } from "@kv/program";

const [, , module = "", mode = ""] = process.argv;
const child = new ChildProcess({ module, args: [mode] });
await child.next();
process.stdout.write(`${child.pid}\n`);
