import type { PairReport } from "../src/report/report.js";
import { explore } from "./explore.js";

// The script of the page that `kv-plan --html` prints. The report is in the page.
explore(JSON.parse(document.getElementById("report")?.textContent ?? "") as PairReport);
