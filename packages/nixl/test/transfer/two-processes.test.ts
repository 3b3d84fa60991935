import { nixlMissing } from "../support/nixl-available.js";
import { twoProcessTests } from "./two-processes.js";

twoProcessTests("UCX", nixlMissing);
