# ruff: noqa: E501 - one sentence a line, however long
"""Shorthand of charts and triage notes for the survey's coded reasons for a visit."""

import random
import re

from vllm_semantic_sched.predict.lay_terms import lay_term
from vllm_semantic_sched.predict.wording import choose

_CHART: dict[str, str] = {
    "Abdominal pain, cramps, spasms, NOS": "abd pain|abdominal pain|abd. cramps|abdominal discomfort|diffuse abd pain",
    "Lower abdominal pain, cramps, spasms": "lower abd pain|RLQ pain|LLQ pain|suprapubic pain",
    "Upper abdominal pain, cramps, spasms": "epigastric pain|RUQ pain|upper abd pain|epigastric discomfort",
    "Stomach and abdominal pain, cramps": "abd pain|epigastralgia|gastric pain",
    "Cough": "cough|cough and sputum|productive cough|dry cough",
    "Vomiting": "vomiting|emesis|N/V|vomiting x [3|5|10]",
    "Nausea": "nausea|N/V|nausea, vomiting",
    "Fever": "fever|febrile|fever and chills|high fever|fever [38.5|39|39.2]",
    "Chills": "chills|chilling|rigors",
    "Chest pain": "chest pain|CP|ant. chest pain|chest pain, Lt|CP radiating to arm",
    "Chest discomfort, pressure, tightness": "chest tightness|chest discomfort|chest pressure",
    "Shortness of breath": "SOB|dyspnea|shortness of breath|SOB on exertion|DOE",
    "Labored or difficult breathing (dyspnea)": "dyspnea|resp. distress|laboured breathing|resp difficulty",
    "Breathing problems, NEC": "dyspnea|breathing difficulty",
    "Headache, pain in head": "headache|HA|h/a|severe headache|headache with nausea",
    "Migraine headache": "migraine|headache, hx migraine",
    "Accident, NOS": "accident|trauma|blunt trauma|fall down|slip down",
    "Injury, other and unspecified": "injury|trauma|contusion|fall",
    "Injury, multiple or unspecified": "multiple trauma|polytrauma|multiple contusion",
    "Motor vehicle accident, type": "MVA|TA|traffic accident, [driver|passenger|pedestrian]|MVC|RTA",
    "Vertigo - dizziness": "dizziness|vertigo|whirling vertigo|lightheaded",
    "Diarrhea": "diarrhea|watery diarrhea|loose stool|vomiting, diarrhea",
    "Constipation": "constipation|no BM x [3|5] days|obstipation",
    "Nasal congestion": "nasal congestion|rhinorrhea|URI sx",
    "Head cold, upper respiratory": "URI|common cold|cold sx",
    "Flu": "flu-like sx|ILI",
    "Hypertension": "high BP|elevated BP|BP elevation|HTN",
    "Throat soreness": "sore throat|throat pain|ST",
    "Throat pain": "sore throat|throat pain|odynophagia",
    "Difficulty in swallowing (dysphagia)": "dysphagia|f/b sensation, throat|swallowing difficulty",
    "Pain, unspecified": "pain|pain control|general ache|myalgia",
    "General weakness": "general weakness|g-weakness|weakness|poor oral intake",
    "Tiredness, exhaustion": "fatigue|malaise|general weakness",
    "Weakness (neurologic)": "weakness, [Rt|Lt]|hemiparesis|focal weakness|side weakness, [Rt|Lt]",
    "Disorders of speech, speech disturbance": "dysarthria|slurred speech|aphasia",
    "Loss of feeling (anesthesia)": "numbness|hypoesthesia|numbness, [Rt|Lt] side",
    "Abnormal sensation (paresthesia)": "paresthesia|tingling|tingling sensation, [hand|foot|face]",
    "Cerebrovascular disease": "r/o CVA|stroke sx|r/o stroke",
    "Unconscious on arrival": "unresponsive|unconscious|LOC|coma|cardiac arrest|DOA",
    "Fainting (syncope)": "syncope|LOC|near syncope|transient LOC|collapse",
    "Convulsions": "seizure|sz|convulsion|post-ictal|febrile seizure",
    "Organic psychoses": "AMS|altered mentation|confusion|disoriented",
    "Functional psychoses": "psychosis|acute psychosis",
    "Behavioral disturbances": "agitation|behavioural change",
    "Anxiety and nervousness": "anxiety|anxious|hyperventilation",
    "Depression": "depression|depressed mood|SI",
    "Suicide attempt": "suicide attempt|SA, [drug ingestion|wrist cutting|hanging]|self harm",
    "Overdose, intentional": "OD|intentional OD|DI|intentional ingestion",
    "Adverse effect of drug abuse": "OD|drug intoxication",
    "Adverse effect of alcohol": "alcohol intox|EtOH|drunken state",
    "Side pain, flank pain": "flank pain|[Rt|Lt] flank pain|CVA tenderness|flank pain, [Rt|Lt]",
    "Painful urination": "dysuria|painful voiding",
    "Frequency and urgency of urination": "frequency|urinary frequency",
    "Retention of urine": "AUR|voiding difficulty|urinary retention",
    "Blood in urine (hematuria)": "hematuria|gross hematuria",
    "Urinary tract infection, NOS": "UTI|dysuria",
    "Blood in stool (melena)": "melena|hematochezia|bloody stool",
    "Anal-rectal bleeding": "rectal bleeding|hematochezia|BRBPR",
    "Nosebleed (epistaxis)": "epistaxis|nasal bleeding",
    "Uterine and vaginal bleeding": "vaginal bleeding|VB",
    "Spotting, bleeding during pregnancy": "VB, pregnant|vaginal spotting, IUP [8|10|12] wks",
    "Pain during pregnancy": "abd pain, pregnant|pelvic pain, IUP [12|20|30] wks",
    "Skin rash": "rash|skin rash|urticaria|hives",
    "Skin itching": "itching|pruritus|whole body itching",
    "Allergy, NOS": "allergic rxn|allergy|urticaria",
    "Edema": "edema|pitting edema|leg edema|gen. edema",
    "Wheezing": "wheezing|asthma attack",
    "Asthma": "asthma|asthma exac",
    "Abnormal pulsations and palpitations": "palpitation|palpitations",
    "Increased heartbeat": "tachycardia|palpitation",
    "Irregular heartbeat": "arrhythmia|A-fib|irregular pulse",
    "For results of blood glucose tests": "hyperglycemia|high BST|hypoglycemia",
    "Diabetes mellitus": "DM|BS high|hyperglycemia",
    "Laceration/cut of upper extremity": "lac, [hand|finger|forearm]|laceration, [hand|2nd finger|thumb]",
    "Laceration/cut of facial area": "lac, [face|lip|forehead|eyebrow]|laceration, face",
    "Laceration/cut of lower extremity": "lac, [foot|shin|knee]|laceration, leg",
    "Laceration/cut of head and neck area": "scalp lac|lac, scalp|laceration, head",
    "Contusions/abrasions/bruises": "contusion|abrasion|bruise|contusion, [knee|hip|arm]",
    "Carbuncle, furuncle, boil": "abscess|boil|furuncle",
    "Infections of skin, NOS": "cellulitis|wound infection",
    "Earache, pain": "ear pain|otalgia|ear pain, [Rt|Lt]",
    "Eye pain": "ocular pain|eye pain, [Rt|Lt]|eyeball pain",
    "Diminished vision": "visual disturbance|decreased visual acuity|blurred vision",
    "Toothache": "dental pain|toothache",
    "Insect bite": "insect bite|bee sting|tick bite",
    "Animal, human bite": "dog bite|cat bite|bite wound",
    "Anemia": "anemia|low Hb",
    "Postoperative visit": "post-op check|wound check",
    "Suture - insertion, removal": "suture removal|stitch out",
    "Medication, other and unspecified kinds": "med refill|medication request",
    "Decreased appetite": "poor oral intake|anorexia",
    "Swelling of leg": "leg swelling|leg edema, [Rt|Lt]|r/o DVT",
    "Jaundice": "jaundice|icterus",
}
_PAIN = re.compile(r"^(.+?)(?: and \w+)? pain(?:, ache)?.*$", re.I)
_HURT = re.compile(r"^(?:Injury, other and unspecified, of|Sprain and strain of) (.+)$")
_BROKEN = re.compile(r"^Fracture/dislocation of (.+)$")


def chart_term(reason: str, rng: random.Random) -> str | None:
    """Words of a triage note for `reason`; None if it says nothing."""
    if reason in _CHART:
        return choose(f"[{_CHART[reason]}]", rng)
    for pattern, finding in (
        (_PAIN, "pain"),
        (_HURT, "[injury|contusion|trauma]"),
        (_BROKEN, "[fx|r/o fx|fracture]"),
    ):
        if match := pattern.match(reason):
            place = match.group(1).lower()
            form = f"[{place} {finding}|{finding}, {place}|{finding}, [Rt|Lt|both] {place}"
            return choose(
                f"{form}|[Rt|Lt|right|left] {place} {finding}|{place} {finding}, [Rt|Lt]]", rng
            )
    term = lay_term(reason, rng)
    return term and term.removeprefix("a ").removeprefix("an ")
