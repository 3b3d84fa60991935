import type { PairReport } from "../src/report/report.js";
import { explore } from "./explore.js";

// The script of `kv-plan --html` pages.
explore(JSON.parse(document.getElementById("report")?.textContent ?? "") as PairReport);
