// npm run lint:prose [-- FILE …]: checks the prose of the pages with vale, by the rules of tools/prose.
import { pages, vale } from "./go-linters.mjs";
import { runInTerminal } from "./setup.mjs";

const requested = process.argv.slice(2);
const files = requested.length > 0 ? requested : pages();
process.exitCode = await runInTerminal(await vale.fetch(), ["--output=line", ...files]);
