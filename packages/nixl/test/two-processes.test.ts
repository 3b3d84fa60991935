import { nixlMissing } from "./require-nixl.js";
import { twoProcessTests } from "./two-processes.js";

twoProcessTests("UCX", nixlMissing);
