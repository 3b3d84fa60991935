export { type PairDoctorOptions, pairDoctor } from "./doctor/doctor.js";
export { type Check, type PairReport, pairReportSchema } from "./report/check.js";
export { reportText } from "./report/text.js";
