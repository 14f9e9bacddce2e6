"""What the demo's two conversations are about: a text of about 1,200 tokens, and a question for each."""

from typing import Final

_PARAGRAPHS: Final = (
    "The mill at Harrow Creek was built by people who had never seen one. In the spring of 1794 four families came "
    "up the estuary in two open boats, with a cow, a forge bellows, eleven sacks of barley and a drawing of a tide "
    "mill that one of them had copied from a traveller's book. The drawing showed a dam, a pond, a gate and a "
    "wheel. It did not show how deep the pond had to be, nor what kept the gate from being torn off by the first "
    "spring tide, and both questions were answered by the creek itself, the second one twice.",
    "A tide mill is a patient machine. The sea rises, pushes the gate open and fills the pond; when it falls again,"
    " the weight of the water closes the gate behind itself, and for some five hours the pond stands higher than "
    "the creek. The miller lifts the sluice, the water runs out under the wheel, and the stones turn. Twice a day "
    "the work begins, and each day it begins about fifty minutes later than the day before, so that a miller lives "
    "by the moon and not by the sun. Ann Pellow, who ran the mill for thirty-one years, is said to have answered "
    "the parson's reproach that she ground barley on Sunday night with the remark that it was he who had the wrong "
    "clock.",
    "The first dam was made of brushwood and clay, four paces wide at the foot. It held for seven weeks. On the "
    "night of the ninth of September the wind went into the south-west with a rising tide behind it, and in the "
    "morning the pond was a mud flat with the gate lying in the middle of it like a dropped hat. The families took "
    "the stones of the old chapel for the second dam, which made them enemies who outlived them all, and set the "
    "gate in a frame of oak with hinges on its upper edge, so that no pull of the ebb could lift it out. That gate "
    "is the one which is shown in the county museum. The hinges were renewed in 1811, in 1846 and in 1902; the oak "
    "was not.",
    "What the mill earned can still be read in the account books, which Ann Pellow kept in a hand so small that the"
    " archive lends a magnifying glass with them. For every sack she kept one part in sixteen. In a good year she "
    "ground nine hundred sacks of barley and three hundred of wheat; in 1816, when there was no summer, she ground "
    "two hundred and six in all, and wrote beside the sum that she had taken no toll from those who brought less "
    "than a sack, since she did not know how to take the sixteenth part of hunger. The same page holds a recipe for"
    " bread with boiled turnips, and the price of a new rope.",
    "Her grandson Tobias added the second wheel. He had worked in a cotton mill and believed in gears. With two "
    "wheels on one pond the water was gone in three hours, and the old stones stood still while the new ones ran, "
    "so that for a whole winter the mill did exactly as much work as before with twice the noise. In spring he "
    "deepened the pond by an arm's length, which took forty men and eleven days, and after that both pairs of "
    "stones could run from the turn of the tide until an hour before the next one. He wrote to his sister that he "
    "had learned what a pond is: not water, but time that somebody has put aside.",
    "The railway came in 1868 and brought flour from a roller mill in the city, whiter and cheaper than any stone "
    "could make it. Harrow Creek went on grinding feed for pigs and horses. During two wars it ground whatever was "
    "brought, and in the second one it also drove a small dynamo, which lit the school for two hours a day, at "
    "times that moved through the week as the tides did; people who were children then still know the tide tables "
    "better than the hours of the bus. The last sack was ground in November 1951. The miller, a "
    "great-great-granddaughter of Ann Pellow, hung the rope on its hook, propped the sluice open so that the creek "
    "might come and go as it liked, and locked the door with a key that weighed as much as a loaf.",
    "Much was said about that key. It had been forged in the first year, when the mill was worth more than "
    "everything else the families owned together, and nobody dared to melt it down, not even in 1816. Each miller "
    "cut one notch in its shaft when he or she took the mill over and none when giving it up, so that the notches "
    "tell how many there were, eleven, but not how long any of them stayed. The twelfth place is smooth. A "
    "locksmith who was asked to copy the key for the museum reported that no two of its teeth were of the same "
    "length, that three of them touched nothing at all, and that in his opinion the smith had never seen a lock "
    "either, and had made this one, like the mill, after a drawing of somebody else's, with great care, and with "
    "whatever it did not show left to be found out.",
    "It stood for twenty-six years. Then a schoolteacher who wanted to show a class how a gate can know which way "
    "the water runs found that it still did: the leaf swung shut at every ebb, with nobody there, and the pond "
    "filled and waited and ran out again through the open sluice. The class wrote a letter to the county. The "
    "repair took nine years and was paid for by sales of bread. Since then the stones run on the second Saturday of"
    " each month, if the tide allows it, and a notice at the door gives the hour, which is different every time.",
)
FIRST_BODY: Final = "\n\n".join(_PARAGRAPHS)
FIRST_QUESTION: Final = "Who ran the mill at Harrow Creek, and how did a tide mill work? Answer in a few sentences."
SECOND_BODY: Final = "\n\n".join(reversed(_PARAGRAPHS))
SECOND_QUESTION: Final = "Retell the history of the mill at Harrow Creek in your own words."
